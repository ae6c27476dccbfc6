"""Texts to tokens: one `Tokenizer`, whose output never depends on the engine inside.

    files = locate(name)  ->  load_tokenizer(files, ...)  ->  Tokenizer.encode(texts)

Engines encode without special tokens. What the tokenizer's post-processor adds (BOS for
llama3_1, EOS for t5) is found once, as a prefix and a suffix, and put around every document
that does not have it already; EOS joins a suffix that lacks it, or leaves it with --no-eos.
So neither is ever there twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from packer_cli._kernels import filling
from packer_cli.errors import UsageError
from packer_cli.records import Int64, Notify, Spans, UInt8, UInt32
from packer_cli.tokenization.engines import (
    BytesEngine,
    Engine,
    FastEngine,
    OrdinaryTextEngine,
    ReferenceEngine,
)
from packer_cli.tokenization.locate import TokenizerFiles
from packer_cli.tokenization.specials import Span, Specials
from packer_cli.tokenization.token_bytes import (
    PLAIN_BYTES,
    TokenBytes,
    by_places,
    mark_trained,
    token_bytes,
)
from packer_cli.tokenization.trust import TrustedEngine

Tokens = tuple[UInt32, Int64, UInt8 | None]


@dataclass(frozen=True)
class TokenizerInfo:
    """A tokenizer as the manifest describes it. Ids are None where it has no such token.

    `prefix` and `suffix`: the ids that are put around every document; None where not all of them
    have the same.
    """

    source: str
    sha256: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int
    bos_token: str | None
    eos_token: str | None
    prefix: tuple[int, ...] | None
    suffix: tuple[int, ...] | None

    def as_json(self) -> dict[str, object]:
        unknown = {name for name in ("prefix", "suffix") if getattr(self, name) is None}
        return {name: value for name, value in vars(self).items() if name not in unknown}


@dataclass(frozen=True)
class Framing:
    """Tokens around every document; None: as the tokenizer's post-processor does.

    `separator` is a text after every document, never trained on.
    """

    bos: bool | None = None
    eos: bool = True
    eos_token: str | None = None
    separator: str | None = None


class Tokenizer:
    """Encodes documents, special tokens included. Safe to share between threads.

    `finish` confirms all that was encoded.
    """

    def __init__(
        self,
        engine: Engine,
        framing: Framing,
        files: TokenizerFiles | None = None,
        reference: ReferenceEngine | None = None,
    ) -> None:
        """`files` and `reference`: of a tokenizer that is not built in. Raises UsageError when
        there is no token that `framing` needs.
        """
        self.engine = engine
        self._files, self._reference = files, reference
        self._making = threading.Lock()  # of the pieces, by one thread alone
        specials = files.specials if files else ()
        self._special_ids = np.unique([token.id for token in specials if not token.unknown])
        self._unknown = [token for token in specials if token.unknown]
        self._frame(framing)

    def _frame(self, framing: Framing) -> None:
        if self._files and self._reference:
            self.info = _described(self._files, self._reference, framing)
        else:
            self.info = _of_bytes(framing)
        around = self.info.prefix or (), self.info.suffix or ()
        self._prefix, self._suffix = (np.array(ids, np.uint32) for ids in around)
        self._separator, _ = (self._reference or self.engine).encode([framing.separator or ""])

    def framed(self, framing: Framing) -> Tokenizer:
        """A tokenizer with something else around documents; `finish` is of both. Raises
        UsageError when there is no such token.
        """
        other = copy(self)
        with _named(self.info.source):
            other._frame(framing)
        return other

    @cached_property
    def _pieces(self) -> TokenBytes:
        return token_bytes(self._files.json) if self._files else PLAIN_BYTES

    @cached_property
    def _ordinary(self) -> OrdinaryTextEngine | None:
        """The engine for texts whose `controls` are given."""
        files = self._files
        return OrdinaryTextEngine(files.json, Specials(files.specials)) if files else None

    def encode(
        self, texts: list[str], spans: Spans | None = None,
        controls: dict[int, list[Span]] | None = None,
    ) -> Tokens:  # fmt: skip
        """Encode documents with the special tokens around the documents; all that is trained is 1,
        wherever it begins.
        """
        ids, offsets, trained = self.encode_bare(texts, spans, controls)
        if trained is not None:
            np.minimum(trained, 1, out=trained)
        return self.surrounded(ids, offsets, trained)

    def count_special(self, ids: UInt32, texts: Iterable[str]) -> int:
        """The number of special tokens that `texts` spell out, whose tokens are `ids`."""
        if not len(ids):
            return 0
        lowest, highest = int(ids.min()), int(ids.max())  # most batches have none, and end here
        special = self._special_ids
        special = special[(special >= lowest) & (special <= highest)]
        number = 0
        if len(special):
            near = ids[(ids >= special[0]) & (ids <= special[-1])]
            number = int(np.isin(near, special).sum())
        return number + sum(
            text.count(token.content)
            for token in self._unknown
            if lowest <= token.id <= highest and (ids == token.id).any()
            for text in texts
        )

    def encode_bare(
        self, texts: list[str], spans: Spans | None = None,
        controls: dict[int, list[Span]] | None = None,
    ) -> Tokens:  # fmt: skip
        """(ids uint32[T], offsets int64[n + 1], trained uint8[T] or None for all).

        A text without any token stays empty. A token is trained, 1, when it holds at least one
        byte of its text's `spans`, and 2 when it begins before that span. `controls`: of some
        texts, the characters where special tokens are; others in those texts are just text. Raises
        InternalError when an earlier sample of the engine differed from the reference.
        """
        trained: UInt8 | None = None
        if spans is not None and isinstance(self.engine, ReferenceEngine):
            ids, offsets, places = self.engine.places(texts)
            parts = [by_places(places[offsets[i] : offsets[i + 1]], text, spans, i)
                     for i, text in enumerate(texts)]  # fmt: skip
            trained = np.concatenate([np.empty(0, np.uint8), *parts])
        else:
            ids, offsets = self.engine.encode(texts)
            if spans is not None:
                with self._making:
                    pieces = self._pieces
                trained = mark_trained(pieces, texts, ids, offsets, spans, self._reference)
        for i, own in sorted((controls or {}).items()):
            if self._ordinary is None:
                break
            new, places = self._ordinary.places(texts[i], own)
            begin, end = offsets[i], offsets[i + 1]
            if trained is not None and spans is not None:
                flags = by_places(places, texts[i], spans, i)
                trained = np.concatenate([trained[:begin], flags, trained[end:]])
            ids = np.concatenate([ids[:begin], new, ids[end:]])
            offsets = offsets.copy()
            offsets[i + 1 :] += len(new) - (end - begin)
        return ids, offsets, trained

    def surrounded(self, ids: UInt32, offsets: Int64, trained: UInt8 | None) -> Tokens:
        """The tokens with prefix, suffix and separator around every document."""
        tokens = _framed((ids, offsets, trained), self._prefix, self._suffix)
        if not len(self._separator):
            return tokens
        ids, offsets, trained = tokens
        if trained is None:
            trained = np.ones(len(ids), np.uint8)
        nothing = self._separator[:0]
        return _framed((ids, offsets, trained), nothing, self._separator, train_suffix=False)

    def finish(self) -> None:
        """Raises InternalError when any sample differed from the reference."""
        if isinstance(self.engine, TrustedEngine):
            self.engine.confirm()


def _framed(tokens: Tokens, prefix: UInt32, suffix: UInt32, *, train_suffix: bool = True) -> Tokens:
    ids, offsets, trained = tokens
    count = len(offsets) - 1
    room = len(ids) + (len(prefix) + len(suffix)) * count
    if room == len(ids):
        return tokens
    out, out_offsets = np.empty(room, np.uint32), np.empty(count + 1, np.int64)
    out_trained = None if trained is None else np.empty(room, np.uint8)
    used = filling.frame_documents(
        ids, offsets, prefix, suffix, out, out_offsets, trained, out_trained, train_suffix
    )
    return out[:used], out_offsets, None if out_trained is None else out_trained[:used]


def bytes_tokenizer(framing: Framing) -> Tokenizer:
    """The built-in tokenizer: UTF-8 bytes, EOS 256, padding 257."""
    return Tokenizer(BytesEngine(), framing)


def _of_bytes(framing: Framing) -> TokenizerInfo:
    if framing.bos:
        raise UsageError("--bos: the bytes tokenizer has no BOS", "name a --tokenizer that has one")
    if framing.eos_token is not None:
        raise UsageError(
            f"--eos-token: {framing.eos_token!r} is not used: the bytes tokenizer has its own",
            "leave it out, or name a --tokenizer",
        )
    own = BytesEngine
    suffix = (own.EOS,) if framing.eos else ()
    return TokenizerInfo(
        "bytes", "", own.VOCAB_SIZE, None, own.EOS, own.PAD, None, "<eos>", (), suffix
    )


def load_tokenizer(
    files: TokenizerFiles,
    *,
    backend: str = "auto",
    framing: Framing = Framing(),
    first_documents: Iterable[str] = (),
    notify: Notify = lambda message: None,
) -> Tokenizer:
    """A tokenizer with the engine that `backend` names, "auto" meaning gigatoken if it agrees.

    `notify` hears why the reference is used instead, or for which texts. Raises UsageError when the
    files cannot be loaded, or when there is no EOS to append.
    """
    with _named(files.source):
        reference = ReferenceEngine(files.json)
        tokenizer = Tokenizer(reference, framing, files, reference)
        if backend == "tokenizers":
            return tokenizer
        try:
            tokenizer.engine = TrustedEngine(
                FastEngine(files.json), reference, files.added_tokens, first_documents, notify
            )
        except ValueError as error:
            problem = str(error).splitlines()[0]
            if backend == "gigatoken":
                raise UsageError(problem, "use --tokenizer-backend tokenizers or auto") from error
            notify(f"using the slower tokenizers engine: {problem}")
        return tokenizer


@contextmanager
def _named(source: str) -> Iterator[None]:
    """A context whose UsageErrors name the tokenizer."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"tokenizer {source}: {error.message}", error.tip) from error


def _described(
    files: TokenizerFiles, reference: ReferenceEngine, framing: Framing
) -> TokenizerInfo:
    """The tokenizer's description, with what goes around every document."""
    if (around := reference.around()) is None:
        raise UsageError("its post-processor rewrites the text's own tokens")
    prefix, suffix = around
    eos_name = files.eos if framing.eos_token is None else framing.eos_token
    # a configured token that the vocabulary lacks only matters where it is needed
    bos, eos, pad = (None if name is None else reference.tokenizer.token_to_id(name)
                     for name in (files.bos, eos_name, files.pad))  # fmt: skip
    if eos is None and (framing.eos or framing.eos_token is not None):
        problem = "no configuration names its EOS token"
        if eos_name is not None:
            problem = f"its EOS token {eos_name!r} is not in the vocabulary"
        tip = "name one that exists with --eos-token, or leave it out with --no-eos"
        raise UsageError(problem, tip)
    if framing.bos is False:
        prefix = []
    elif framing.bos and bos not in prefix:
        if bos is None:
            raise UsageError("--bos: the tokenizer's configuration names no BOS token that it has")
        prefix = [bos, *prefix]
    if suffix[-1:] == [eos]:
        suffix = suffix[:-1]  # with --no-eos, not even the post-processor's own
    if framing.eos and eos is not None:
        suffix = [*suffix, eos]
    if pad is None:
        pad = 0 if eos is None else eos  # masked by position, never by its id: any id will do
    return TokenizerInfo(
        files.source, files.sha256, reference.tokenizer.get_vocab_size(), bos, eos, pad,
        None if bos is None else files.bos, None if eos is None else eos_name,
        tuple(prefix), tuple(suffix),
    )  # fmt: skip
