"""Sets to audit: conversations as rows, defects that are planted into them, and files of them.

rows = conversations(seed=0)             sound rows
expected = DEFECTS["no-eos"](rows)       plants it, and says which rows have it now
FORMATS["trl"](rows, path)               writes them, as the format has them
audited(path)                            rule -> rows, by the command line
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from support import packer

from packer_cli.inputs.indexed_tokens import header
from packer_cli.result.layout import saved_dataset

PAD, BOS, EOS, MARK, USER, ASSISTANT, LINE = range(7)
FIRST, IDS, LENGTH = 10, 190, 96
IGNORED = -100


@dataclass
class Document:
    """`trained`: whether each token has a label."""

    ids: list[int]
    trained: list[bool]
    labels: dict[int, int] = field(default_factory=dict)  # place -> another label


@dataclass
class Sets:
    """Rows of documents. `pad`: of each row, (token, whether it has a label) behind the last."""

    rows: list[list[Document]]
    pad: list[list[tuple[int, bool]]] = field(default_factory=list)
    shifted: set[int] = field(default_factory=set)  # rows whose labels are one place early
    moved: set[int] = field(default_factory=set)  # rows whose second column says something else

    def documents(self) -> list[tuple[int, Document]]:
        return [(number, one) for number, row in enumerate(self.rows) for one in row]

    def ids(self, row: int) -> list[int]:
        return [token for one in self.rows[row] for token in one.ids]

    def labels(self, row: int) -> list[int]:
        return [
            one.labels.get(place, token if trained else IGNORED)
            for one in self.rows[row]
            for place, (token, trained) in enumerate(zip(one.ids, one.trained, strict=True))
        ]

    def lengths(self, row: int) -> list[int]:
        return [len(one.ids) for one in self.rows[row]]


def conversation(random_: random.Random, turns: int) -> Document:
    ids, trained = [BOS], [False]
    for _ in range(turns):
        for role in (USER, ASSISTANT):
            words = [random_.randrange(FIRST, IDS) for _ in range(random_.randint(2, 9))]
            ids += [MARK, role, LINE, *words]
            trained += [False] * 3 + [role == ASSISTANT] * len(words)
    return Document([*ids, EOS], [*trained, True])


def conversations(seed: int, rows: int = 40, length: int = LENGTH) -> Sets:
    """Rows, each as full as the next conversation leaves it, but for some that are full."""
    random_, made = random.Random(seed), list[list[Document]]()
    while len(made) < rows:
        row, room = [], length
        while True:
            one = conversation(random_, random_.randint(1, 2))
            if len(one.ids) > room:
                break
            row.append(one)
            room -= len(one.ids)
        if room and random_.random() < 0.3:  # the last answer is longer
            last = row[-1]
            last.ids[-1:-1] = [random_.randrange(FIRST, IDS) for _ in range(room)]
            last.trained[-1:-1] = [True] * room
        made.append(row)
    return Sets(made, [[] for _ in made])


Defect = Callable[[Sets, int], set[int]]  # plants it, and returns the rows that have it


def _some(sets: Sets, seed: int, most: int = 5, least: int = 1) -> list[tuple[int, Document]]:
    random_ = random.Random(seed)
    places = [(row, one) for row, one in sets.documents() if sum(sets.lengths(row)) < LENGTH]
    return random_.sample(places, random_.randint(least, most))


def planted(change: Callable[[Document], object], most: int = 5) -> Defect:
    """A defect that changes some documents."""

    def plant(sets: Sets, seed: int) -> set[int]:
        chosen = _some(sets, seed, most)
        for _, one in chosen:
            change(one)
        return {row for row, _ in chosen}

    return plant


def drop_first(one: Document) -> None:
    del one.ids[0], one.trained[0]


def train_header(one: Document) -> None:
    begin = _answer(one)
    one.trained[begin - 3 : begin] = [True] * 3


def train_all(one: Document) -> None:
    one.trained = [False] + [True] * (len(one.ids) - 1)


def change_label(one: Document) -> None:
    one.labels[len(one.ids) - 3] = IDS + 5


def bos_doubled(sets: Sets, seed: int) -> set[int]:
    chosen = [(row, one) for row, one in _some(sets, seed) if sum(sets.lengths(row)) < LENGTH]
    seen, kept = set[int](), []
    for row, one in chosen:  # one of a row, so that it still fits
        if row not in seen:
            seen.add(row)
            kept.append(row)
            one.ids.insert(0, BOS)
            one.trained.insert(0, False)
    return set(kept)


def untrained_row(sets: Sets, seed: int) -> set[int]:
    rows = {row for row, _ in _some(sets, seed)}
    for row in rows:
        for one in sets.rows[row]:
            one.trained = [False] * len(one.ids)
    return rows


def untrained_document(sets: Sets, seed: int) -> set[int]:
    rows = {row for row, _ in _some(sets, seed, 20, 10) if len(sets.rows[row]) > 1}
    for row in rows:
        one = sets.rows[row][-1]
        one.trained = [False] * len(one.ids)
    return rows


def labels_shifted(sets: Sets, seed: int) -> set[int]:
    sets.shifted = {row for row, _ in _some(sets, seed, 10)}
    return sets.shifted


def cross_document_target(sets: Sets, seed: int) -> set[int]:
    rows = {row for row, _ in _some(sets, seed, 20, 10) if len(sets.rows[row]) > 1}
    for row in rows:
        sets.rows[row][1].trained[0] = True
    return rows


def boundaries_disagree(sets: Sets, seed: int) -> set[int]:
    sets.moved = {row for row, _ in _some(sets, seed, 20, 10) if len(sets.rows[row]) > 1}
    return sets.moved


def padding_trained(sets: Sets, seed: int) -> set[int]:
    rows = {row for row in range(len(sets.rows)) if sum(sets.lengths(row)) < LENGTH - 4}
    chosen = set(random.Random(seed).sample(sorted(rows), 5))
    for row in chosen:
        sets.pad[row] = [(PAD, True)]
    return chosen


def dominant_token(sets: Sets, seed: int) -> set[int]:
    unknown = FIRST + seed % 50
    for _, one in sets.documents():
        for place, token in enumerate(one.ids):
            if token >= FIRST and place % 5:
                one.ids[place] = unknown
    rows = range(len(sets.rows))
    return {row for row in rows if 4 * sets.ids(row).count(unknown) > len(sets.ids(row))}


def _answer(one: Document, last: bool = True) -> int:
    """Where the answer of the first or last turn begins."""
    places = [place for place, token in enumerate(one.ids) if token == ASSISTANT]
    return places[-1 if last else 0] + 2


def header_partly_trained(sets: Sets, seed: int) -> set[int]:
    chosen = _some(sets, seed)
    for number, (_, one) in enumerate(chosen):
        begin = _answer(one, last=bool(number % 2))
        if number % 3:
            one.trained[begin - 1] = True
        else:
            one.trained[begin] = False
    return {row for row, _ in chosen}


def cut(sets: Sets, seed: int) -> set[int]:
    random_ = random.Random(seed)
    rows = {row for row, _ in _some(sets, seed)}
    for row in rows:
        one, room = sets.rows[row][-1], LENGTH - sum(sets.lengths(row))
        one.ids[-1:] = [random_.randrange(FIRST, IDS) for _ in range(room + 1)]
        one.trained += [True] * room
    return rows


def duplicate_rows(sets: Sets, seed: int) -> set[int]:
    random_, count = random.Random(seed), len(sets.rows)
    for _ in range(random_.randint(1, 5)):
        sets.rows.append(sets.rows[random_.randrange(count)])
        sets.pad.append([])
    return set(range(count, len(sets.rows)))


def overlap(sets: Sets, seed: int) -> set[int]:
    """Windows of one long answer, with a stride of a quarter of what they hold."""
    random_ = random.Random(seed)
    words = [random_.randrange(FIRST, IDS) for _ in range(400)]
    first, size = len(sets.rows), LENGTH - 6
    for begin in range(0, 240, size // 4):
        ids = [BOS, MARK, USER, LINE, *words[begin : begin + size], EOS]
        sets.rows.append([Document(ids, [False] * 4 + [True] * (len(ids) - 4))])
        sets.pad.append([])
    for row in range(first, len(sets.rows)):  # the same beginning is no overlap
        del sets.rows[row][0].ids[1:4], sets.rows[row][0].trained[1:4]
    return set(range(first + 1, len(sets.rows)))


DEFECTS: dict[str, Defect] = {
    "no-eos": planted(lambda one: one.ids.__setitem__(-1, FIRST)),
    "eos-untrained": planted(lambda one: one.trained.__setitem__(-1, False), 20),
    "bos-missing": planted(drop_first),
    "bos-doubled": bos_doubled,
    "untrained-row": untrained_row,
    "untrained-document": untrained_document,
    "labels-shifted": labels_shifted,
    "cross-document-target": cross_document_target,
    "boundaries-disagree": boundaries_disagree,
    "padding-trained": padding_trained,
    "labels-differ": planted(change_label),
    "ids-out-of-range": planted(lambda one: one.ids.__setitem__(-2, -7)),
    "dominant-token": dominant_token,
    "header-trained": planted(train_header),
    "header-partly-trained": header_partly_trained,
    "all-trained": planted(train_all),
    "cut": cut,
    "duplicate-rows": duplicate_rows,
    "overlap": overlap,
}


# --- files


def columns_of(sets: Sets, *, padded: bool, shift: bool = False) -> dict[str, list[Any]]:
    """Columns of all rows; padded to LENGTH, or not at all."""
    columns: dict[str, list[Any]] = {name: [] for name in (
        "input_ids", "labels", "attention_mask", "numbers", "position_ids", "lengths", "starts",
        "cu_seqlens",
    )}  # fmt: skip
    for row in range(len(sets.rows)):
        ids, labels, lengths = sets.ids(row), sets.labels(row), sets.lengths(row)
        told = [*lengths]
        if row in sets.moved:
            told[0], told[1] = told[0] - 1, told[1] + 1
        pad = [*sets.pad[row]] if padded else []
        if padded:
            pad += [(PAD, False)] * (LENGTH - len(ids) - len(pad))
        room = len(pad)
        own = [*labels, *(token if trained else IGNORED for token, trained in pad)]
        if shift != (row in sets.shifted):
            own = [*own[1:], IGNORED]
        ends = [0, *accumulate(lengths)]
        columns["input_ids"].append([*ids, *(token for token, _ in pad)])
        columns["labels"].append(own)
        columns["attention_mask"].append([1] * len(ids) + [0] * room)
        numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
        columns["numbers"].append(numbers + [0] * room)
        columns["position_ids"].append([place for one in told for place in range(one)] + [0] * room)
        columns["lengths"].append(lengths)
        columns["starts"].append(ends[:-1])
        columns["cu_seqlens"].append(ends)
    return columns


def _table(columns: dict[str, list[Any]], **kinds: Any) -> Any:
    own = {
        name: pa.array(of, kinds.get(name, pa.list_(pa.int64()))) for name, of in columns.items()
    }
    return pa.table(own)


def _saved(table: Any, folder: Path) -> None:
    """As `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    half = len(table) // 2
    for name, part in (("data-0.arrow", table[:half]), ("data-1.arrow", table[half:])):
        with pa.ipc.new_stream(str(folder / name), part.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    for name, content in saved_dataset(["data-0.arrow", "data-1.arrow"], "").items():
        (folder / name).write_bytes(content)


def trl(sets: Sets, path: Path) -> None:
    c = columns_of(sets, padded=False)
    chosen = {"input_ids": c["input_ids"], "labels": c["labels"], "seq_lengths": c["lengths"]}
    if sets.moved:
        chosen["position_ids"] = c["position_ids"]
    _saved(_table(chosen), path)


def trl_mask(sets: Sets, path: Path) -> None:
    """As TRL before it had labels."""
    c = columns_of(sets, padded=False)
    mask = [[int(one != IGNORED) for one in row] for row in c["labels"]]
    _saved(_table({"input_ids": c["input_ids"], "completion_mask": mask,
                   "seq_lengths": c["lengths"]}), path)  # fmt: skip


def llamafactory(sets: Sets, path: Path) -> None:
    c = columns_of(sets, padded=True)
    table = _table({"input_ids": c["input_ids"], "labels": c["labels"],
                    "attention_mask": c["numbers"], "position_ids": c["position_ids"]})  # fmt: skip
    _saved(table, path / "train")
    (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))


def parquet(sets: Sets, path: Path) -> None:
    """Padded rows with a mask of 0 and 1, and cu_seqlens."""
    c = columns_of(sets, padded=True)
    chosen = {name: c[name] for name in ("input_ids", "labels", "attention_mask", "cu_seqlens")}
    if sets.moved:
        chosen["position_ids"] = c["position_ids"]
    kind = pa.list_(pa.int32(), LENGTH)
    path.mkdir()
    table = _table(chosen, input_ids=kind, labels=kind)
    pq.write_table(table[:17], path / "a.parquet", row_group_size=5)
    pq.write_table(table[17:], path / "b.parquet", row_group_size=50)


def bridge(sets: Sets, path: Path) -> None:
    """Of Megatron-Bridge: `loss_mask` is that of the next token."""
    ids, mask, starts = [], [], []
    for row in range(len(sets.rows)):
        own, flags, begins = list[int](), list[int](), list[int]()
        for one in sets.rows[row]:  # each with a token that is a target alone
            begins.append(len(own))
            own += [*one.ids, PAD]
            flags += [*map(int, one.trained[1:]), 0, 0]
        ids, mask, starts = [*ids, own], [*mask, flags], [*starts, begins]
    table = _table({"input_ids": ids, "loss_mask": mask, "seq_start_id": starts},
                   loss_mask=pa.list_(pa.int8()))  # fmt: skip
    path.mkdir()
    pq.write_table(table, path / "packed.idx.parquet", row_group_size=9)


def automodel(sets: Sets, path: Path) -> None:
    """Of NeMo Automodel: labels are shifted, within the row."""
    c = columns_of(sets, padded=True, shift=True)
    _saved(_table({"input_ids": c["input_ids"], "labels": c["labels"], "seq_lens": c["lengths"]}),
           path)  # fmt: skip


def jsonl(sets: Sets, path: Path) -> None:
    """Documents, not packed."""
    lines = []
    for row, one in sets.documents():
        own = Sets([[one]])
        labels = own.labels(0)
        if row in sets.shifted:
            labels = [*labels[1:], IGNORED]
        record = {"input_ids": own.ids(0), "labels": labels, "text": "\u001b"}
        lines.append(json.dumps(record))
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")


def _flat(sets: Sets) -> tuple[list[int], list[bool], list[int]]:
    documents = [one for _, one in sets.documents()]
    ids = [token for one in documents for token in one.ids]
    trained = [flag for one in documents for flag in one.trained]
    return ids, trained, [*accumulate(len(one.ids) for one in documents)]


def megatron(sets: Sets, path: Path) -> None:
    ids, _, ends = _flat(sets)
    path.with_suffix(".bin").write_bytes(np.array(ids, "<i4").tobytes())
    lengths = np.diff([0, *ends]).astype("<i4")
    begins = (np.array([0, *ends[:-1]]) * 4).astype("<i8")
    index = header("<i4", len(lengths), len(lengths) + 1) + lengths.tobytes() + begins.tobytes()
    index += np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)


def olmo(sets: Sets, path: Path) -> None:
    ids, trained, ends = _flat(sets)
    path.mkdir()
    (path / "token_ids_part_0000.npy").write_bytes(np.array(ids, "<u4").tobytes())
    (path / "labels_mask_part_0000.npy").write_bytes(np.array(trained, "?").tobytes())
    with gzip.open(path / "token_ids_part_0000.csv.gz", "wt") as file:
        csv.writer(file).writerows(pairwise([0, *ends]))


_OF_LABELS = {"labels-shifted", "labels-differ"}
_OF_TRAINED = _OF_LABELS | {
    "eos-untrained", "untrained-row", "untrained-document", "cross-document-target",
    "padding-trained", "header-trained", "header-partly-trained", "all-trained",
}  # fmt: skip
_OF_ROWS = {"untrained-document", "cross-document-target", "cut"}
_OF_PADDING, _OF_COLUMNS = {"padding-trained"}, {"boundaries-disagree"}


@dataclass(frozen=True)
class Writer:
    """Writes a set; `name` is what the audit calls the format, and `path` what it is named.
    `cannot`: defects that the format cannot have.
    """

    name: str
    write: Callable[[Sets, Path], None]
    cannot: set[str]
    path: str = "set"
    packed: bool = True


WRITERS = [
    Writer("trl", trl, _OF_PADDING),
    Writer("trl", trl_mask, _OF_LABELS | _OF_COLUMNS | _OF_PADDING),
    Writer("llamafactory", llamafactory, set()),
    Writer("columns", parquet, set()),
    Writer("megatron-bridge", bridge,
           _OF_LABELS | _OF_COLUMNS | _OF_PADDING | {"cross-document-target"}),
    Writer("seq-lens", automodel, _OF_COLUMNS),
    Writer("columns", jsonl, _OF_ROWS | _OF_COLUMNS | _OF_PADDING, "set.jsonl", packed=False),
    Writer("megatron", megatron, _OF_TRAINED | _OF_ROWS | _OF_COLUMNS, "set.bin", packed=False),
    Writer("olmo", olmo, _OF_LABELS | _OF_ROWS | _OF_COLUMNS | _OF_PADDING | {"ids-out-of-range"},
           packed=False),
]  # fmt: skip


def audited(path: Path | str, *options: object) -> dict[str, Any]:
    """What `packer audit --json` prints."""
    result = packer("audit", path, "--json", *options)
    assert result.exit_code in (0, 1), result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    serious = [one for one in report["findings"] if one["severity"] != "note"]
    assert result.exit_code == bool(serious)
    return report


def found(report: dict[str, Any]) -> dict[str, int]:
    """Rule -> rows, of errors and warnings."""
    return {one["rule"]: one["rows"] for one in report["findings"] if one["severity"] != "note"}
