"""Opening results of `packer pack`: packed directories and views; and several of them as one, whose
rows follow one another: whether they go together, and what they are then.

A view refers to documents of tokenized directories, and reads as rows of a packed directory. Every
reader gets complete rows, which are those that the same command without --view would have written,
byte for byte: the kernel that fills rows takes tokens from the mapped documents to their places.
What references say is checked each time, since files may change while they are mapped.

The shards of a result at a URL are copied into a folder when they are first read.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import filling, gathering
from packer_cli.errors import DataError, UsageError, os_errors
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.records import FILE, POSITION, START, Documents, Int64, offsets_of
from packer_cli.result.layout import MANIFEST, SQUARED_LENGTHS, Shard, digest
from packer_cli.result.manifest import Manifest, load
from packer_cli.result.reader import (
    HEADER_BYTES,
    PARTS,
    Lists,
    Mapped,
    PackedDirectory,
    as_batch,
    in_parts,
    squared_lengths,
)
from packer_cli.result.rules import segments_in
from packer_cli.result.shard_writer import PADDED, rows_per_batch, values_in_rows
from packer_cli.result.tokenized import TokenizedDirectory, Tokens, open_tokenized
from packer_cli.storage import no_link

WITH_THE_SAME = "pack them with the same options"
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_PROBLEMS = {
    1: "cu_seqlens does not ascend from 0 to {} at most",
    2: "segments are not as many as its boundaries less one",
    3: "refers to a document that its tokenized directories do not have",
    4: "refers to tokens beyond the end of a document",
}
CACHE = "and cache= names a local directory"
_WHERE = "say where it is now: --tokens DIR, or tokens=[DIR] in Python"


def open_packed(
    path: str | os.PathLike[str],
    tokens: Paths | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> PackedDirectory:
    """Open a directory written by `packer pack`, also a view, or one at a URL.

    `tokens`: of a view, where its tokenized directories are, if they are no longer where they were
    packed from; one or several, in any order. `cache`: the local folder for copies of what is at a
    URL. Default: ~/.cache/packer, or below XDG_CACHE_HOME.

    Raises DataError when it is unfinished, of another format version, or when a shard is
    missing or has another size than the manifest says, and for a view whose tokenized directories
    are gone or changed; UsageError for `tokens` of what is no view, and a view at a URL.
    """
    if storage.is_url(os.fspath(path)):
        url = storage.public(os.fspath(path)).rstrip("/")
        return CopiedDirectory(url, load(url), cache)
    directory = storage.local(path, "rows are only read from local directories")
    while True:
        packed = opened(directory, load(directory), tokens)
        try:
            for shard in packed.facts.shards:
                packed.check_size(shard)
        except DataError:
            if packed.replaced() is None:
                raise
            continue  # another, complete result is there by now
        return packed


def opened(path: Path, facts: Manifest, tokens: Paths | None = None) -> PackedDirectory:
    """A result whose manifest was read already, without a look at its shards."""
    given = _listed(tokens)
    if facts.config.view:
        return View(path, facts, given)
    if given:
        raise UsageError(f"--tokens: {path} is no view: it has its tokens itself", "leave it out")
    return PackedDirectory(path, facts)


def _listed(tokens: Paths | None) -> list[str | os.PathLike[str]]:
    return [tokens] if isinstance(tokens, str | os.PathLike) else list(tokens or ())


# Views


class View(PackedDirectory):
    """A finished view, whose tokenized directories are there, as they were.

    directories  by the number of the input
    """

    def __init__(
        self, path: Path, facts: Manifest, tokens: Sequence[str | os.PathLike[str]] = ()
    ) -> None:
        """`tokens`: where tokenized directories are now. Raises DataError for those that are gone
        or changed.
        """
        super().__init__(path, facts)
        self.directories = _directories(path, facts, tokens)
        self._columns = facts.config.value_columns
        self._tokens = Tokens(self.directories, self._columns.values())

    def _complete(self, shard: Shard) -> Iterator[Any]:
        return (batch for batch, _ in self.counted(shard))

    def counted(self, shard: Shard) -> Iterator[tuple[Any, int]]:
        """The complete record batches of a shard, each with the number of its trained tokens.
        Raises as `batches`.
        """
        kinds, step = self._schema(), rows_per_batch(self.facts.config)
        first = 0
        with self._readable(shard):
            for stored in self.stored(shard):
                mapped = Mapped.of(stored.schema, first, [stored])
                for begin in range(first, first + stored.num_rows, step):
                    rows = np.arange(begin, min(begin + step, first + stored.num_rows))
                    columns, trained = self._filled(mapped, rows, in_parts(kinds.names))
                    yield as_batch(columns, kinds), trained
                first += stored.num_rows

    def segments(self, shard: Shard) -> Int64:
        """int64[4, segments] of a shard, see `rules.py`, each of which is checked.
        Raises as `batches`.
        """
        found, first = [], 0
        with self._readable(shard):
            for stored in self.stored(shard):
                mapped = Mapped.of(stored.schema, first, [stored])
                rows = np.arange(first, first := first + stored.num_rows)
                self._filled(mapped, rows, ())  # which checks them
                found.append(segments_in(stored))
        return np.concatenate(found, axis=1)

    def fetch(self, segments: Int64) -> Documents:
        """Return segments as documents, with what of them is trained on and what follows them."""
        file, position = segments[:2]
        start, length = segments[2:].astype(np.int32, order="C")
        trained = self._tokens.trained_of(self._tokens.numbered(file, position), start, length)
        places = {FILE: file, POSITION: position, START: start}
        pieces = Documents.of(None, offsets_of(length), trained).beside({}, places)
        return self._tokens.fetch(pieces)

    def _gathered(self, mapped: Mapped, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Columns that are stored alone are not filled, nor checked."""
        if all(name in self.stored_columns or name in PARTS for name in columns):
            return super()._gathered(mapped, rows, columns)
        return self._filled(mapped, rows, columns)[0]

    def _filled(
        self, mapped: Mapped, rows: Int64, columns: Sequence[str]
    ) -> tuple[dict[str, Any], int]:
        """(columns of rows that are mapped, how many tokens are trained on). Raises ArrowInvalid
        for a row that is not sound.
        """
        config, lists = self.facts.config, mapped.gather(rows, "cu_seqlens")
        boundaries, count = lists.values, max(0, len(lists.values) - len(rows))
        # of the segments: documents, where in memory their tokens begin, places in the document
        row_offsets = np.empty(len(rows) + 1, np.int64)
        number, address = np.empty((2, count), np.int64)
        start, length = np.empty((2, count), np.int32)
        row, problem = gathering.find_pieces(
            rows, mapped.firsts, mapped.addresses["segments"], boundaries, lists.ends,
            self._tokens.documents, self._tokens.spans.tokens, self.max_length,
            config.segment_multiple, row_offsets, number, start, length, address,
        )  # fmt: skip
        if problem:
            text = _PROBLEMS[problem].format(self.max_length)
            raise pa.ArrowInvalid(f"row {rows[row]}: {text}")
        out: dict[str, Any] = {name: np.empty((len(rows), self.max_length), kind)
               for name, kind in PADDED.items() if name in columns}  # fmt: skip
        padded = np.empty_like(boundaries) if config.segment_multiple > 1 else None
        trained = filling.fill_rows(
            None, self._tokens.trained_of(number, start, length), address, length,
            np.arange(count), row_offsets, self.max_length, self.facts.pad_token_id,
            out.get("input_ids"), out.get("labels"), out.get("attention_mask"),
            out.get("position_ids"), boundaries, np.empty(len(rows) + 1, np.int32),
            config.segment_multiple, padded, True,
        )  # fmt: skip
        if any(name in self._columns for name in columns):
            pieces = Documents.of(None, offsets_of(length)).beside({}, {START: start})
            pieces = self._tokens.with_columns(pieces, number)
            made = values_in_rows(config, pieces, np.arange(count), row_offsets)
            for name, column in made.items():
                of_segments = self._columns[name].is_of_segments
                out[name] = Lists(column, row_offsets) if of_segments else column
        out["cu_seqlens"] = lists
        if padded is not None:
            out[PADDED_BOUNDARIES] = Lists(padded, lists.ends)
        of_rows = {n: out[n] if n in out else mapped.gather(rows, n) for n in columns}
        return of_rows, trained


def _directories(
    view: Path, facts: Manifest, given: Sequence[str | os.PathLike[str]]
) -> dict[int, TokenizedDirectory]:
    """The tokenized directories by the numbers of the inputs."""
    expected = {one.sha256 for one in facts.inputs}
    found: dict[str, TokenizedDirectory] = {}
    for name in given:
        directory = open_tokenized(name)
        sha256 = digest(directory.path / MANIFEST)[1]
        if sha256 not in expected:
            raise DataError(
                f"{name}: is not a tokenized directory of the view {view}: the sha256 of its "
                f"manifest is {sha256}, expected {' or '.join(sorted(expected))}",
                "give the one that the view was packed from",
            )
        found[sha256] = directory
    for one in facts.inputs:
        if one.sha256 not in found:
            found[one.sha256] = open_tokenized(_recorded(view, one.path, one.sha256))
    return {number: found[one.sha256] for number, one in enumerate(facts.inputs)}


def _recorded(view: Path, path: str, expected: str) -> Path:
    """The tokenized directory of an input, where the view's manifest says. Raises DataError.

    If both were moved, or are on another machine, it is found from a folder that both lie in: the
    ends of the path are tried from the view and from all folders above it. The digest tells whether
    it is the right one.
    """
    recorded, what = Path(path), "is gone"
    folder, parts = storage.shown(str(recorded.parent)), recorded.parts[1:]
    ends = [Path(*parts[first:]) for first in range(len(parts) - 1)]
    folders = view.absolute(), *view.absolute().parents
    moved = (above / end for above in folders for end in ends)
    for place in dict.fromkeys([recorded, *moved]):
        if storage.is_file(str(place)):
            if digest(place)[1] == expected:
                return Path(storage.shown(str(place.parent)))
            what = "has changed"
    raise DataError(
        f"{view}: its tokenized directory {folder} {what}: expected its {MANIFEST} with the "
        f"sha256 {expected}",
        _WHERE,
    )


# Results at URLs

_UPLOAD_AGAIN = "upload the result again; if it was replaced, open it again"


class CopiedDirectory(PackedDirectory):
    """A packed directory at a URL, whose files are copied into a folder below `cache` when they are
    first read, and compared with their digests. Nothing there is ever removed.

    Raises UsageError for a view.
    """

    def __init__(self, url: str, facts: Manifest, cache: str | os.PathLike[str] | None) -> None:
        if facts.config.view:
            raise UsageError(
                f"{url}: a view, which is only read from a local directory",
                "copy it and its tokenized directories to local paths; or pack without --view",
            )
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        place = os.path.join(home, "packer") if cache is None else storage.local(cache, CACHE)
        super().__init__(Path(place).expanduser().absolute() / str(facts.sha256), facts)
        self.where = url

    def check_size(self, shard: Shard) -> None:
        """Nothing: what is copied is compared with the manifest."""

    def _map(self, shard: Shard) -> Any:
        self._copy(shard.file, shard.sha256, shard.bytes)
        return super()._map(shard)

    def local_squares(self) -> Path:
        size = HEADER_BYTES + 8 * len(self)
        self._copy(SQUARED_LENGTHS, self.facts.side_files[SQUARED_LENGTHS], size)
        return super().local_squares()

    def _copy(self, name: str, sha256: str, size: int) -> None:
        """Copy a file, unless it is there. One process does so, others wait: a lock is held on the
        copy until it has its name. Raises DataError for an object that is another by now.
        """
        path, part = self.path / name, self.path / f"{name}.part"

        def is_here() -> bool:
            return path.exists() and path.stat().st_size == size

        if is_here():
            return
        with os_errors(path, "write"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(part, "ab", opener=no_link) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    if is_here():
                        return
                    storage.download(self.place_of(name), part)
                    if (found := digest(part)[1]) != sha256:
                        raise DataError(
                            f"{self.place_of(name)}: its sha256 is {found}, the manifest says "
                            f"{sha256}",
                            _UPLOAD_AGAIN,
                        )
                    os.replace(part, path)
                except DataError as error:
                    raise self.replaced() or error from error
                finally:  # a copy of this process (fork) would go on holding it
                    fcntl.flock(file, fcntl.LOCK_UN)


# Several results as one


class Joined:
    """Several results as one, whose rows follow one another.

    firsts  int64[results + 1], the first row of each, and how many rows there are

    Raises DataError, naming both, for results whose rows do not go into one batch.
    """

    def __init__(self, parts: Sequence[PackedDirectory]) -> None:
        self.parts = list(parts)
        self.firsts = offsets_of([*map(len, parts)])
        first = parts[0]
        for other in parts[1:]:
            known = _properties(other)
            for name, value in _properties(first).items():
                if value != known.get(name, value):
                    raise DataError(
                        f"{first.path} and {other.path} do not go together: {name} is {value} in "
                        f"the first and {known[name]} in the second",
                        WITH_THE_SAME,
                    )

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def places(self, rows: Int64) -> tuple[Int64, Int64]:
        """(number in its result, which result) of rows."""
        which = np.searchsorted(self.firsts, rows, side="right") - 1
        return rows - self.firsts[which], which

    @property
    def fingerprint(self) -> str:
        """Digest that rows in the same order share, wherever they lie."""
        prints = []
        for facts in (part.facts for part in self.parts):
            digests = [shard.sha256 for shard in facts.shards]
            if facts.config.view:  # whose shards hold no tokens
                digests += [one.sha256 for one in facts.inputs]
            prints.append(sha256("".join(digests).encode()).hexdigest())
        return prints[0] if len(prints) == 1 else sha256("".join(prints).encode()).hexdigest()

    @property
    def squared_lengths(self) -> Int64:
        """int64[rows], the sum of squared segment lengths of every row."""
        sums = [squared_lengths(part) for part in self.parts]
        return sums[0] if len(sums) == 1 else np.concatenate(sums)  # one is mapped


def _properties(packed: PackedDirectory) -> dict[str, object]:
    """What rows of one batch must have in common, in words."""
    facts, tokenizer = packed.facts, packed.facts.tokenizer
    columns = sorted(map(str, facts.config.value_columns.values()))
    return {
        "max_length": packed.max_length,
        "the segment multiple": packed.segment_multiple,
        "columns of values": ", ".join(columns) or "none",
        "the tokenizer": f"{tokenizer.source}, sha256 {tokenizer.sha256}" if tokenizer else "none",
    }


def tokens_of_each(
    paths: Sequence[str | os.PathLike[str]], tokens: Paths | None
) -> list[Paths | None]:
    """For each result, those of the tokenized directories that it is a view of; of a single result
    all of them.

    Raises UsageError for a directory that none of several is a view of.
    """
    if not tokens or len(paths) == 1:
        return [tokens for _ in paths]
    digests = {os.fspath(one): digest(open_tokenized(one).path / MANIFEST)[1]
               for one in _listed(tokens)}  # fmt: skip
    wanted = list[Paths | None]()
    for facts in map(load, paths):
        inputs = {one.sha256 for one in facts.inputs} if facts.config.view else ()
        wanted.append([name for name, sha256 in digests.items() if sha256 in inputs])
    if unused := digests.keys() - set(chain.from_iterable(map(_listed, wanted))):
        raise UsageError(
            f"tokens: none of the results is a view of {min(unused)}",
            "give the tokenized directories that the views were packed from",
        )
    return wanted
