"""Texts to tokens: one `Tokenizer`, whose output never depends on the engine inside.

    files = locate(name)  ->  load_tokenizer(files, ...)  ->  Tokenizer.encode(texts)

Engines encode without special tokens. What the tokenizer's post-processor adds (BOS for
llama3_1, EOS for t5) is found once, as a prefix and a suffix, and put around every document
that does not have it already; EOS joins a suffix that lacks it, or leaves it with --no-eos.
So neither is ever there twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import numpy as np

from packer_cli._kernels import filling
from packer_cli.early import EarlyReference
from packer_cli.errors import UsageError
from packer_cli.records import Int64, Notify, Spans, UInt8, UInt32
from packer_cli.tokenization.agreement import Samples, differs_at_start
from packer_cli.tokenization.compared import ComparedCharacters
from packer_cli.tokenization.engines import (
    BytesEngine,
    Engine,
    FastEngine,
    OrdinaryTextEngine,
    ReferenceEngine,
)
from packer_cli.tokenization.locate import TokenizerFiles
from packer_cli.tokenization.reference_process import ReferenceProcess
from packer_cli.tokenization.specials import Span, Specials, SpecialToken
from packer_cli.tokenization.token_bytes import (
    TokenBytes,
    by_places,
    mark_trained,
    no_bytes,
    plain_bytes,
    token_bytes,
)

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
        around = {"prefix": self.prefix, "suffix": self.suffix}
        unknown = {name for name, ids in around.items() if ids is None}
        return {name: value for name, value in vars(self).items() if name not in unknown}


@dataclass(frozen=True)
class Framing:
    """What goes around every document; None: as the tokenizer's post-processor does.

    `separator` is a text after every document, never trained on.
    """

    bos: bool | None = None
    eos: bool = True
    eos_token: str | None = None
    separator: str | None = None


@dataclass(frozen=True)
class _Frame:
    prefix: UInt32
    suffix: UInt32
    separator: UInt32


class Tokenizer:
    """Encodes documents, special tokens included. Safe to share between threads.

    `finish` confirms all that was encoded; `close` must be called at the end.
    """

    def __init__(
        self,
        info: TokenizerInfo,
        engine: Engine,
        frame: _Frame,
        pieces: Callable[[], TokenBytes],
        reference: ReferenceProcess | None = None,
        ordinary: Callable[[], OrdinaryTextEngine] | None = None,
        specials: Sequence[SpecialToken] = (),
        notify: Notify = lambda message: None,
        *,
        describe: _DescribeFramed,
    ) -> None:
        """`reference` is what the engine is checked against; `notify` hears of differences.

        ordinary  makes the engine for texts whose `controls` are given
        describe  gives `info` and `frame` for another framing
        """
        self.info = info
        self._describe = describe
        self.engine = engine
        self._frame = frame
        self._pieces = cache(pieces)
        self._making = threading.Lock()  # of the pieces, by one thread alone
        self._reference = reference
        self._ordinary = None if ordinary is None else cache(ordinary)
        self._special_runs = _runs([token.id for token in specials if not token.unknown])
        self._unknown = [token for token in specials if token.unknown]
        self._samples = Samples()
        self._compared = None
        if reference is not None:
            self._compared = ComparedCharacters(engine, reference, notify)

    def framed(self, framing: Framing) -> Tokenizer:
        """The same with something else around documents; `finish` and `close` are of both. Raises
        UsageError when there is no such token.
        """
        other = copy(self)
        try:
            other.info, other._frame = self._describe(framing)
        except UsageError as error:
            raise _of_tokenizer(self.info.source, error) from error
        return other

    def encode(
        self, texts: list[str], spans: Spans | None = None,
        controls: dict[int, list[Span]] | None = None,
    ) -> Tokens:  # fmt: skip
        """As `encode_bare`, with the special tokens around the documents."""
        return self.surrounded(*self.encode_bare(texts, spans, controls))

    def count_special(self, ids: UInt32, texts: Iterable[str]) -> int:
        """How many special tokens `texts` spell out, whose tokens are `ids`."""
        if not len(ids):
            return 0
        lowest, highest = int(ids.min()), int(ids.max())  # most batches have none, and end here
        known = sum(
            int(np.count_nonzero(ids - begin < size))
            for begin, size in self._special_runs
            if begin <= highest and begin + size > lowest
        )
        return known + sum(
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
        ids, offsets, trained = self._encode_marked(texts, spans)
        for text in sorted(controls or {}):
            ids, offsets, trained = self._ordinarily(
                text, texts[text], (controls or {})[text], spans, (ids, offsets, trained)
            )
        return ids, offsets, trained

    def _ordinarily(
        self, number: int, text: str, controls: list[Span], spans: Spans | None, tokens: Tokens
    ) -> Tokens:
        """The tokens with those of one text replaced."""
        if self._ordinary is None:
            return tokens
        ids, offsets, trained = tokens
        new, places = self._ordinary().places(text, controls)
        begin, end = offsets[number], offsets[number + 1]
        if trained is not None and spans is not None:
            own = slice(spans.offsets[number], spans.offsets[number + 1])
            flags = by_places(places, text, spans.begin[own], spans.end[own])
            trained = np.concatenate([trained[:begin], flags, trained[end:]])
        offsets = offsets.copy()
        offsets[number + 1 :] += len(new) - (end - begin)
        return np.concatenate([ids[:begin], new, ids[end:]]), offsets, trained

    def _encode_marked(self, texts: list[str], spans: Spans | None) -> Tokens:
        if spans is not None and isinstance(self.engine, ReferenceEngine):
            ids, offsets, places = self.engine.places(texts)
            return ids, offsets, _by_places(texts, offsets, spans, places)
        ids, offsets = self._encode(texts)
        trained: UInt8 | None = None
        if spans is not None:
            with self._making:
                pieces = self._pieces()
            trained = mark_trained(pieces, texts, ids, offsets, spans, self._reference)
        return ids, offsets, trained

    def _encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        """The tokens of the texts themselves, as the reference would give them."""
        reference, compared = self._reference, self._compared
        if reference is None or compared is None or not texts:
            return self.engine.encode(texts)
        untrusted = compared.untrusted(texts)
        others = set(untrusted)
        trusted = [text for i, text in enumerate(texts) if i not in others] if others else texts
        sample = self._samples.of(trusted)
        if sample:
            # one more text in the same call, rather than a call for so little
            ids, offsets = self.engine.encode([*texts, sample])
            reference.check(sample, ids[offsets[-2] :].copy())
            ids, offsets = ids[: offsets[-2]], offsets[:-1]
        else:
            ids, offsets = self.engine.encode(texts)
        if untrusted:
            exact = reference.encode([texts[i] for i in untrusted])
            ids, offsets = _with_others(ids, offsets, untrusted, *exact)
        return ids, offsets

    def surrounded(self, ids: UInt32, offsets: Int64, trained: UInt8 | None) -> Tokens:
        """The tokens with prefix, suffix and separator around every document."""
        frame = self._frame
        ids, offsets, trained = _framed(ids, offsets, trained, frame.prefix, frame.suffix)
        if len(frame.separator):
            if trained is None:
                trained = np.ones(len(ids), np.uint8)
            nothing = frame.separator[:0]
            return _framed(ids, offsets, trained, nothing, frame.separator, train_suffix=False)
        return ids, offsets, trained

    def finish(self) -> None:
        """Wait for the last sample. Raises InternalError when it differed."""
        if self._reference is not None:
            self._reference.finish()

    def close(self) -> None:
        if self._reference is not None:
            self._reference.close()


def _with_others(
    ids: UInt32, offsets: Int64, which: list[int], other_ids: UInt32, other_offsets: Int64
) -> tuple[UInt32, Int64]:
    """The documents, with other tokens for those of `which`."""
    parts, lengths, done = [], np.diff(offsets), 0
    for document, (a, b) in zip(which, pairwise(other_offsets.tolist()), strict=True):
        parts += [ids[done : offsets[document]], other_ids[a:b]]
        lengths[document], done = b - a, offsets[document + 1]
    flat = np.concatenate([*parts, ids[done:]])
    return flat, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _by_places(texts: list[str], offsets: Int64, spans: Spans, places: Int64) -> UInt8:
    """As `mark_trained`, from the reference's offsets of each token."""
    parts = [np.empty(0, np.uint8)]
    for i, text in enumerate(texts):
        own = slice(spans.offsets[i], spans.offsets[i + 1])
        of_text = places[offsets[i] : offsets[i + 1]]
        parts.append(by_places(of_text, text, spans.begin[own], spans.end[own]))
    return np.concatenate(parts)


def _framed(
    ids: UInt32, offsets: Int64, trained: UInt8 | None, prefix: UInt32, suffix: UInt32,
    *, train_suffix: bool = True,
) -> Tokens:  # fmt: skip
    count = len(offsets) - 1
    room = len(ids) + (len(prefix) + len(suffix)) * count
    if room == len(ids):
        return ids, offsets, trained
    out, out_offsets = np.empty(room, np.uint32), np.empty(count + 1, np.int64)
    out_trained = None if trained is None else np.empty(room, np.uint8)
    used = filling.frame_documents(
        ids, offsets, prefix, suffix, out, out_offsets, trained, out_trained, train_suffix
    )
    return out[:used], out_offsets, None if out_trained is None else out_trained[:used]


_Described = tuple[TokenizerInfo, _Frame]
_DescribeFramed = Callable[[Framing], _Described]


def bytes_tokenizer(framing: Framing) -> Tokenizer:
    """The built-in tokenizer: UTF-8 bytes, EOS 256, padding 257."""
    engine = BytesEngine()
    describe = partial(_describe_bytes, engine)
    info, frame = describe(framing)
    return Tokenizer(info, engine, frame, plain_bytes, describe=describe)


def _describe_bytes(engine: BytesEngine, framing: Framing) -> _Described:
    if framing.bos:
        raise UsageError("--bos: the bytes tokenizer has no BOS", "name a --tokenizer that has one")
    if framing.eos_token is not None:
        raise UsageError(
            f"--eos-token: {framing.eos_token!r} is not used: the bytes tokenizer has its own",
            "leave it out, or name a --tokenizer",
        )
    separator, _ = engine.encode([framing.separator or ""])
    suffix = (engine.EOS,) if framing.eos else ()
    info = TokenizerInfo(
        "bytes", "", engine.VOCAB_SIZE, None, engine.EOS, engine.PAD, None, "<eos>", (), suffix
    )
    return info, _Frame(np.array([], np.uint32), np.array(suffix, np.uint32), separator)


def load_tokenizer(
    files: TokenizerFiles,
    *,
    backend: str = "auto",
    framing: Framing = Framing(),
    first_documents: Iterable[str] = (),
    early: EarlyReference | None = None,
    notify: Notify = lambda message: None,
) -> Tokenizer:
    """A tokenizer with the engine that `backend` names, "auto" meaning gigatoken if it agrees.

    `notify` hears why the reference is used instead, or for which texts. Raises UsageError when the
    files cannot be loaded, or when there is no EOS to append.
    """
    try:
        if backend == "tokenizers":
            return _on_reference(files, framing)
        tokenizer, problem = _on_fast(files, framing, first_documents, early, notify)
        if tokenizer is not None:
            return tokenizer
        if backend == "gigatoken":
            raise UsageError(problem, "use --tokenizer-backend tokenizers or auto")
        tokenizer = _on_reference(files, framing)
        notify(f"using the slower tokenizers engine: {problem}")
        return tokenizer
    except UsageError as error:
        raise _of_tokenizer(files.source, error) from error


def _of_tokenizer(source: str, error: UsageError) -> UsageError:
    return UsageError(f"tokenizer {source}: {error.message}", error.tip)


def _on_reference(files: TokenizerFiles, framing: Framing) -> Tokenizer:
    reference = ReferenceEngine(files.json)
    describe = partial(_describe, files, reference)
    info, frame = describe(framing)
    return Tokenizer(info, reference, frame, no_bytes, None, *_special(files), describe=describe)


def _special(
    files: TokenizerFiles,
) -> tuple[Callable[[], OrdinaryTextEngine], tuple[SpecialToken, ...]]:
    """The special tokens as `Tokenizer` takes them."""
    return partial(OrdinaryTextEngine, files.json, Specials(files.specials)), files.specials


def _runs(ids: list[int]) -> list[tuple[np.uint32, int]]:
    """The ids as (first, how many) of each run of them: most tokenizers have one or two."""
    runs: list[list[int]] = []
    for token in sorted(set(ids)):
        if runs and token == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([token, 1])
    return [(np.uint32(begin), size) for begin, size in runs]


def _on_fast(
    files: TokenizerFiles,
    framing: Framing,
    documents: Iterable[str],
    early: EarlyReference | None,
    notify: Notify,
) -> tuple[Tokenizer | None, str]:
    """(tokenizer, "") or (None, why the fast engine cannot be used)."""
    reference = ReferenceProcess(files.json, early)  # it loads while the fast engine does
    try:
        fast = FastEngine(files.json)
        describe = partial(_describe, files, reference)
        info, frame = describe(framing)
        difference = differs_at_start(fast, reference, files.added_tokens, documents)
        if difference is None:
            pieces = partial(token_bytes, files.json)
            special = _special(files)
            tokenizer = Tokenizer(
                info, fast, frame, pieces, reference, *special, notify, describe=describe
            )
            return tokenizer, ""
        problem = f"gigatoken differs from tokenizers on {difference}"
    except ValueError as error:
        problem = str(error).splitlines()[0]
    except BaseException:
        reference.close()
        raise
    reference.close()
    return None, problem


def _describe(
    files: TokenizerFiles, reference: ReferenceEngine | ReferenceProcess, framing: Framing
) -> tuple[TokenizerInfo, _Frame]:
    """The tokenizer's description, and what goes around every document."""
    eos_name = files.eos if framing.eos_token is None else framing.eos_token
    names = [name for name in (files.bos, eos_name, files.pad) if name is not None]
    about = reference.describe(names)
    if about.prefix is None:
        raise UsageError("its post-processor rewrites the text's own tokens")
    # a configured token that the vocabulary lacks only matters where it is needed
    bos, eos, pad = (about.token_ids.get(name or "") for name in (files.bos, eos_name, files.pad))
    if eos is None and (framing.eos or framing.eos_token is not None):
        problem = "no configuration names its EOS token"
        if eos_name is not None:
            problem = f"its EOS token {eos_name!r} is not in the vocabulary"
        raise UsageError(
            problem,
            "name one that exists with --eos-token, or leave it out with --no-eos",
        )
    prefix, suffix = about.prefix, about.suffix
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
    separator, _ = reference.encode([framing.separator or ""])
    info = TokenizerInfo(
        files.source, files.sha256, about.vocab_size, bos, eos, pad,
        None if bos is None else files.bos, None if eos is None else eos_name,
        tuple(prefix), tuple(suffix),
    )  # fmt: skip
    return info, _Frame(np.array(prefix, np.uint32), np.array(suffix, np.uint32), separator)
