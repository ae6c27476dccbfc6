"""Texts to tokens: one `Tokenizer`, whose output never depends on the engine inside it.

    files = locate(name)  ->  load_tokenizer(files, ...)  ->  Tokenizer.encode(texts)

Engines encode without special tokens. What the tokenizer's post-processor adds (BOS for
llama3_1, EOS for t5) is found once, as a prefix and a suffix, and put around every document
that does not have it already; EOS joins a suffix that lacks it. So neither is ever there twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packer_cli._kernels import filling
from packer_cli.errors import UsageError
from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.agreement import check_sample, differs_at_start
from packer_cli.tokenization.engines import BytesEngine, Engine, FastEngine, ReferenceEngine
from packer_cli.tokenization.locate import TokenizerFiles


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
    """Encodes documents, special tokens included. Safe to share between threads."""

    def __init__(
        self,
        info: TokenizerInfo,
        engine: Engine,
        prefix: list[int],
        suffix: list[int],
        reference: ReferenceEngine | None = None,
    ) -> None:
        """`reference` is given when `engine` is to be checked against it by samples."""
        self.info = info
        self.engine = engine
        self._prefix = np.array(prefix, np.uint32)
        self._suffix = np.array(suffix, np.uint32)
        self._reference = reference

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        """(ids uint32[T], offsets int64[n + 1]). A text without any token stays empty.

        Raises InternalError when the engine is found to differ from the reference.
        """
        ids, offsets = self.engine.encode(texts)
        if self._reference is not None:
            check_sample(self.engine, self._reference, texts, ids, offsets)
        extra = len(self._prefix) + len(self._suffix)
        if not extra:
            return ids, offsets
        framed = np.empty(len(ids) + extra * len(texts), np.uint32)
        framed_offsets = np.empty(len(texts) + 1, np.int64)
        used = filling.frame_documents(
            ids, offsets, self._prefix, self._suffix, framed, framed_offsets
        )
        return framed[:used], framed_offsets


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
    try:
        reference = ReferenceEngine(files.json)
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(
            f"tokenizer {files.source}: cannot load tokenizer.json: {error}"
        ) from error
    prefix, suffix = _post_processor(reference, files.source)
    info, eos = _describe(files, reference, eos_token)
    if add_eos and eos is None:
        raise UsageError(
            f"tokenizer {files.source}: no configuration names its EOS token",
            "name it with --eos-token, or leave it out with --no-eos",
        )
    if add_eos and eos is not None and suffix[-1:] != [eos]:
        suffix = [*suffix, eos]
    if backend == "tokenizers":
        return Tokenizer(info, reference, prefix, suffix)
    try:
        fast = FastEngine(files.json)
        difference = differs_at_start(fast, reference, first_documents or [])
        problem = difference and f"gigatoken differs from tokenizers on {difference}"
    except ValueError as error:
        problem = str(error).splitlines()[0]
    if problem is None:
        return Tokenizer(info, fast, prefix, suffix, reference)
    if backend == "gigatoken":
        raise UsageError(
            f"tokenizer {files.source}: {problem}", "use --tokenizer-backend tokenizers or auto"
        )
    notify(f"using the slower tokenizers engine: {problem}")
    return Tokenizer(info, reference, prefix, suffix)


def _post_processor(reference: ReferenceEngine, source: str) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after one document."""
    bare = reference.tokenizer.encode("a b", add_special_tokens=False).ids
    full = reference.tokenizer.encode("a b", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UsageError(f"tokenizer {source}: its post-processor rewrites the text's own tokens")


def _describe(
    files: TokenizerFiles, reference: ReferenceEngine, eos_token: str | None
) -> tuple[TokenizerInfo, int | None]:
    def token_id(token: str | None, role: str) -> int | None:
        if token is None:
            return None
        found: int | None = reference.tokenizer.token_to_id(token)
        if found is None:
            raise UsageError(
                f"tokenizer {files.source}: its {role} token {token!r} is not in the vocabulary",
                f"name a token that exists{' with --eos-token' if role == 'EOS' else ''}",
            )
        return found

    eos = token_id(eos_token or files.eos, "EOS")
    pad = token_id(files.pad, "padding")
    if pad is None:
        pad = eos if eos is not None else 0  # padding is masked by position, never by its id
    info = TokenizerInfo(
        files.source,
        files.sha256,
        reference.tokenizer.get_vocab_size(with_added_tokens=True),
        token_id(files.bos, "BOS"),
        eos,
        pad,
    )
    return info, eos
