"""Texts to tokens: one `Tokenizer`, whose output never depends on the engine inside it.

    files = locate(name)  ->  load_tokenizer(files, ...)  ->  Tokenizer.encode(texts)

Engines encode without special tokens. What the tokenizer's post-processor adds (BOS for
llama3_1, EOS for t5) is found once, as a prefix and a suffix, and put around every document
that does not have it already; EOS joins a suffix that lacks it, or leaves it with --no-eos.
So neither is ever there twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from packer_cli._kernels import filling
from packer_cli.errors import UsageError
from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.agreement import differs_at_start, sample_of
from packer_cli.tokenization.engines import BytesEngine, Engine, FastEngine, ReferenceEngine
from packer_cli.tokenization.locate import TokenizerFiles
from packer_cli.tokenization.reference_process import ReferenceProcess


@dataclass(frozen=True)
class TokenizerInfo:
    """What the manifest says of a tokenizer. Ids are None where it has no such token."""

    source: str
    sha256: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int

    def as_json(self) -> dict[str, object]:
        return dict(vars(self))


class Tokenizer:
    """Encodes documents, special tokens included. Safe to share between threads.

    `finish` confirms all that was encoded; `close` must be called at the end.
    """

    def __init__(
        self,
        info: TokenizerInfo,
        engine: Engine,
        prefix: list[int],
        suffix: list[int],
        reference: ReferenceProcess | None = None,
    ) -> None:
        """`reference` is given when `engine` is to be checked against it by samples."""
        self.info = info
        self.engine = engine
        self._prefix = np.array(prefix, np.uint32)
        self._suffix = np.array(suffix, np.uint32)
        self._reference = reference

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        """(ids uint32[T], offsets int64[n + 1]). A text without any token stays empty.

        Raises InternalError when an earlier sample of the engine differed from the reference.
        """
        if self._reference is not None and texts:
            # one more text in the same call, rather than a call for so little
            sample = sample_of(texts)
            ids, offsets = self.engine.encode([*texts, sample])
            self._reference.check(sample, ids[offsets[-2] :].copy())
            ids, offsets = ids[: offsets[-2]], offsets[:-1]
        else:
            ids, offsets = self.engine.encode(texts)
        extra = len(self._prefix) + len(self._suffix)
        if not extra:
            return ids, offsets
        framed = np.empty(len(ids) + extra * len(texts), np.uint32)
        framed_offsets = np.empty(len(texts) + 1, np.int64)
        used = filling.frame_documents(
            ids, offsets, self._prefix, self._suffix, framed, framed_offsets
        )
        return framed[:used], framed_offsets

    def finish(self) -> None:
        """Wait for the last sample. Raises InternalError when it differed."""
        if self._reference is not None:
            self._reference.finish()

    def close(self) -> None:
        if self._reference is not None:
            self._reference.close()


_Describe = Callable[
    [ReferenceEngine | ReferenceProcess], tuple[TokenizerInfo, list[int], list[int]]
]


def bytes_tokenizer(add_eos: bool) -> Tokenizer:
    """The built-in tokenizer: UTF-8 bytes, EOS 256, padding 257."""
    engine = BytesEngine()
    info = TokenizerInfo("bytes", "", engine.VOCAB_SIZE, None, engine.EOS, engine.PAD)
    return Tokenizer(info, engine, [], [engine.EOS] if add_eos else [])


def load_tokenizer(
    files: TokenizerFiles,
    *,
    backend: str = "auto",
    add_eos: bool = True,
    eos_token: str | None = None,
    first_documents: list[str] | None = None,
    notify: Callable[[str], None] = lambda message: None,
) -> Tokenizer:
    """A tokenizer with the engine that `backend` names, "auto" meaning gigatoken if it agrees.

    `notify` hears why the reference is used instead. Raises UsageError when the files cannot
    be loaded, or when there is no EOS to append.
    """
    describe = partial(_describe, files, add_eos, eos_token)
    try:
        if backend == "tokenizers":
            return _on_reference(files, describe)
        tokenizer, problem = _on_fast(files, describe, first_documents or [])
        if tokenizer is not None:
            return tokenizer
        if backend == "gigatoken":
            raise UsageError(problem, "use --tokenizer-backend tokenizers or auto")
        tokenizer = _on_reference(files, describe)
        notify(f"using the slower tokenizers engine: {problem}")
        return tokenizer
    except UsageError as error:
        raise UsageError(f"tokenizer {files.source}: {error.message}", error.tip) from error


def _on_reference(files: TokenizerFiles, describe: _Describe) -> Tokenizer:
    reference = ReferenceEngine(files.json)
    info, prefix, suffix = describe(reference)
    return Tokenizer(info, reference, prefix, suffix)


def _on_fast(
    files: TokenizerFiles, describe: _Describe, documents: list[str]
) -> tuple[Tokenizer | None, str]:
    """(tokenizer, "") or (None, why the fast engine cannot be used)."""
    reference = ReferenceProcess(files.json)  # it loads while the fast engine does
    try:
        fast = FastEngine(files.json)
        info, prefix, suffix = describe(reference)
        difference = differs_at_start(fast, reference, files.added_tokens, documents)
        if difference is None:
            return Tokenizer(info, fast, prefix, suffix, reference), ""
        problem = f"gigatoken differs from tokenizers on {difference}"
    except ValueError as error:
        problem = str(error).splitlines()[0]
    except BaseException:
        reference.close()
        raise
    reference.close()
    return None, problem


def _describe(
    files: TokenizerFiles,
    add_eos: bool,
    eos_token: str | None,
    reference: ReferenceEngine | ReferenceProcess,
) -> tuple[TokenizerInfo, list[int], list[int]]:
    """(info, prefix, suffix): what goes around every document, EOS included."""
    eos_name = files.eos if eos_token is None else eos_token
    names = [name for name in (files.bos, eos_name, files.pad) if name is not None]
    about = reference.describe(names)
    if about.prefix is None:
        raise UsageError("its post-processor rewrites the text's own tokens")
    # a configured token that the vocabulary lacks only matters where it is needed
    bos, eos, pad = (about.token_ids.get(name or "") for name in (files.bos, eos_name, files.pad))
    if eos is None and (add_eos or eos_token is not None):
        problem = "no configuration names its EOS token"
        if eos_name is not None:
            problem = f"its EOS token {eos_name!r} is not in the vocabulary"
        raise UsageError(
            problem,
            "name one that exists with --eos-token, or leave it out with --no-eos",
        )
    suffix = about.suffix
    if suffix[-1:] == [eos]:
        suffix = suffix[:-1]  # with --no-eos, not even the post-processor's own
    if add_eos and eos is not None:
        suffix = [*suffix, eos]
    if pad is None:
        pad = 0 if eos is None else eos  # masked by position, never by its id: any id will do
    info = TokenizerInfo(files.source, files.sha256, about.vocab_size, bos, eos, pad)
    return info, about.prefix, suffix
