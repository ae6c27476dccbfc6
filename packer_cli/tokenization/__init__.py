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
from packer_cli.tokenization.agreement import differs_at_start, sample
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
        ids, offsets = self.engine.encode(texts)
        if self._reference is not None and texts:
            self._reference.check(*sample(texts, ids, offsets, self.engine))
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
    if backend == "tokenizers":
        reference = ReferenceEngine(files.json)
        info, prefix, suffix = _describe(files, reference, add_eos, eos_token)
        return Tokenizer(info, reference, prefix, suffix)
    process = ReferenceProcess(files.json)  # it loads while the fast engine does
    try:
        fast, problem = _fast_engine(files.json)
        info, prefix, suffix = _describe(files, process, add_eos, eos_token)
        if fast is not None:
            difference = differs_at_start(fast, process, files.added_tokens, first_documents or [])
            if difference is None:
                return Tokenizer(info, fast, prefix, suffix, process)
            problem = f"gigatoken differs from tokenizers on {difference}"
    except BaseException:
        process.close()
        raise
    process.close()
    if backend == "gigatoken":
        raise UsageError(
            f"tokenizer {files.source}: {problem}", "use --tokenizer-backend tokenizers or auto"
        )
    notify(f"using the slower tokenizers engine: {problem}")
    return Tokenizer(info, ReferenceEngine(files.json), prefix, suffix)


def _fast_engine(tokenizer_json: bytes) -> tuple[FastEngine | None, str]:
    """(engine, "") or (None, why it cannot be used)."""
    try:
        return FastEngine(tokenizer_json), ""
    except ValueError as error:
        return None, str(error).splitlines()[0]


def _describe(
    files: TokenizerFiles,
    reference: ReferenceEngine | ReferenceProcess,
    add_eos: bool,
    eos_token: str | None,
) -> tuple[TokenizerInfo, list[int], list[int]]:
    """(info, prefix, suffix): what goes around every document, EOS included."""
    roles = {"BOS": files.bos, "EOS": eos_token or files.eos, "padding": files.pad}
    try:
        about = reference.describe([token for token in roles.values() if token is not None])
    except UsageError as error:
        raise UsageError(f"tokenizer {files.source}: {error.message}", error.tip) from error
    if about.prefix is None:
        raise UsageError(
            f"tokenizer {files.source}: its post-processor rewrites the text's own tokens"
        )
    ids: dict[str, int | None] = {}
    for role, token in roles.items():
        ids[role] = None if token is None else about.token_ids[token]
        if token is not None and ids[role] is None:
            raise UsageError(
                f"tokenizer {files.source}: its {role} token {token!r} is not in the vocabulary",
                f"name a token that exists{' with --eos-token' if role == 'EOS' else ''}",
            )
    eos, suffix = ids["EOS"], about.suffix
    if add_eos and eos is None:
        raise UsageError(
            f"tokenizer {files.source}: no configuration names its EOS token",
            "name it with --eos-token, or leave it out with --no-eos",
        )
    if add_eos and eos is not None and suffix[-1:] != [eos]:
        suffix = [*suffix, eos]
    # padding is masked by position, never by its id, so any id will do
    pad = ids["padding"] if ids["padding"] is not None else eos if eos is not None else 0
    info = TokenizerInfo(files.source, files.sha256, about.vocab_size, ids["BOS"], eos, pad)
    return info, about.prefix, suffix
