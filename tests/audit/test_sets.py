"""`packer audit`: what it says, which rules need more than one row, packer's own sets, and what it
cannot read.
"""

from __future__ import annotations

import json
import random
import shlex
import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers
from approving import assert_approved
from audited import (
    DEFECTS,
    EOS,
    FIRST,
    IDS,
    LENGTH,
    LINE,
    Sets,
    audited,
    bridge,
    conversations,
    found,
    jsonl,
    llamafactory,
    megatron,
    parquet,
    trl,
)
from support import ALL_COLUMNS, COMPRESSORS, assert_error, heavy, packer, random_texts, succeeds
from support import jsonl as text_lines
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from packer_cli.audit import RULES, audit, open_set
from packer_cli.errors import DataError


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    trl(conversations(1), tmp_path / "set")
    return tmp_path / "set"


def test_what_it_prints(sound: Path, tmp_path: Path) -> None:
    """Of a valid set, and of one with a defect."""
    sets = conversations(1)
    DEFECTS["no-eos"](sets, 1)
    trl(sets, tmp_path / "bad")
    results = [packer("audit", path) for path in (sound, tmp_path / "bad")]
    assert [one.exit_code for one in results] == [0, 1]
    texts = [
        text.replace(str(tmp_path), "") for one in results for text in (one.stdout, one.stderr)
    ]
    assert_approved("audit", *texts)


def test_every_rule_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    for name, rule in RULES.items():
        assert f"| `{name}` |" in page, name
        assert rule.means, name
        assert rule.todo, name


@pytest.mark.parametrize("options", [[], ["--sample", "7"], ["--sample", "1k"]])
def test_a_sample_is_evenly_spread(sound: Path, options: list[str]) -> None:
    report = audited(sound, *options)
    assert report["rows"] == {"7": 7}.get(options[-1] if options else "", 40)


def test_eos_inside_where_it_tells_boundaries(tmp_path: Path) -> None:
    sets = conversations(1)
    for _, one in sets.documents()[::3]:
        one.ids[4] = EOS
    megatron(sets, tmp_path / "set")
    assert found(audited(tmp_path / "set.bin")) == {"eos-inside": len(sets.documents()[::3])}


def test_rows_that_are_emptier_than_best_fit_leaves_them(tmp_path: Path) -> None:
    sets = conversations(1)
    rows = [[one] for _, one in sets.documents()]  # each alone
    rows[0] += rows.pop()
    sets.rows, sets.pad = rows, [[] for _ in rows]
    trl(sets, tmp_path / "set")
    report = audited(tmp_path / "set", "--max-length", LENGTH)
    (one,) = report["findings"]
    assert (one["rule"], one["severity"]) == ("underfilled", "note")
    assert one["rows"] == sum(sum(sets.lengths(row)) < LENGTH for row in range(len(rows)))


def test_windows_of_a_stream_need_a_tokenizer(tmp_path: Path) -> None:
    """Rows without boundaries: EOS is not plain, which is said, and not passed over."""
    random_ = random.Random(0)
    stream = []
    for _ in range(300):
        length = random_.randint(3, 40)
        stream += [*(random_.randrange(FIRST, 200) for _ in range(length)), 256]
    rows = [stream[at : at + 64] for at in range(0, len(stream) - 64, 64)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    report = audited(tmp_path / "a.parquet")
    assert "give --tokenizer" in report["not_applied"]["no-eos"]
    assert "give --tokenizer, if" in report["not_applied"]["bos-missing"]
    report = audited(tmp_path / "a.parquet", "--tokenizer", "bytes")
    assert report["not_applied"]["bos-missing"] == "the tokenizer has no BOS"
    assert report["documents"] == sum(row.count(256) for row in rows)
    assert found(report) == {}


def test_ids_beyond_the_vocabulary_of_a_tokenizer(tmp_path: Path) -> None:
    rows = [[65, 66, 258 + (row == 3), 256] if row % 2 else [65, 66, 256] for row in range(9)]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    report = audited(tmp_path / "a.parquet", "-t", "bytes")
    assert found(report)["ids-out-of-range"] == 4


SAMPLE = Path(__file__).parents[2] / "sample_data"
TEMPLATE = ["--chat-template", SAMPLE / "chat.jinja"]
PACKS: list[tuple[str, list[object]]] = [
    ("texts", ["--max-length", 64]),
    ("texts", ["--max-length", 64, "--segment-multiple", 8, *ALL_COLUMNS]),
    ("texts", ["--max-length", 64, "--strategy", "wrap"]),
    # texts end with EOS, chats with what their template has
    ("chats and texts", ["-l", 512, *TEMPLATE]),
    ("chats and texts", ["-l", 2048, *TEMPLATE]),
    # the text of an earlier turn, which several documents have, is trained on once
    ("chats", ["-l", 1024, "--turns", "each", "--strategy", "next-fit", *TEMPLATE]),
    # pieces of a text are neither cut nor windows
    *[("long texts", ["-l", 150, "--strategy", one]) for one in ("best-fit", "next-fit", "wrap")],
]


@pytest.mark.parametrize(("data", "options"), PACKS)
@pytest.mark.usefixtures("folder")
def test_rows_of_packer_are_sound(data: str, options: list[object]) -> None:
    texts = random_texts(200)
    if data == "long texts":  # one repeats a passage, one a letter
        random_ = random.Random(0)
        scripts = (string.ascii_lowercase, string.ascii_uppercase, "0123456")
        texts = ["".join(random_.choices(letters, k=20_000)) for letters in scripts]
        texts += ["".join(random_.choices(string.punctuation, k=100)) * 60, "=" * 3000]
    Path("a.jsonl").write_bytes(text_lines(*texts))
    inputs = {
        "chats": [SAMPLE / "chat.jsonl"],
        "chats and texts": [SAMPLE / "chat.jsonl", SAMPLE / "documents.jsonl"],
    }.get(data, [Path("a.jsonl")])
    succeeds("pack", *inputs, *options, "-t", "bytes", "-q", "-o", "out")
    report = audited("out")
    assert report["format"] == "packer"
    assert found(report).keys() <= ({"duplicate-rows"} if data == "long texts" else set())
    assert data == "chats" or {"no-eos", "cut"}.isdisjoint(report["not_applied"])


@pytest.mark.usefixtures("folder")
def test_the_tip_shows_rows_as_they_were_read() -> None:
    sets = conversations(1)
    DEFECTS["labels-differ"](sets, 1)
    trl(sets, Path("a set"))
    options = ["--tokenizer", "bytes", "--format", "trl", "--max-length", "96"]
    command = shlex.split(packer("audit", "a set", *options).stderr.partition("packer ")[2])
    assert command[:2] == ["show", "a set"]
    assert command[3:] == options
    succeeds(*command)
    assert packer("audit", "a set").stderr.endswith("; add --tokenizer NAME to see text\n")


@pytest.mark.parametrize("rule", ["", "no-eos"])
@pytest.mark.parametrize("ending", [[EOS, LINE], [IDS + 1], [IDS - 1, FIRST, FIRST, FIRST]])
def test_documents_of_two_kinds_end_in_two_ways(
    tmp_path: Path, rule: str, ending: list[int]
) -> None:
    sets = conversations(1, length=LENGTH - 30)
    for _, one in sets.documents()[::3]:
        one.ids[-1:] = ending
        one.trained += [False] * (len(ending) - 1)
    one = sets.rows[4][0]  # whose end is that of neither kind
    one.ids[-1] = one.ids[-2] = FIRST + 1 if rule else one.ids[-1]
    trl(sets, tmp_path / "set")
    report = audited(tmp_path / "set", "--max-length", LENGTH)
    assert found(report) == ({rule: 1} if rule else {})


@pytest.mark.parametrize("ending", [[], [300]])
@pytest.mark.parametrize("column", ["seq_lengths", "labels"])
def test_eos_that_no_document_has(tmp_path: Path, column: str, ending: list[int]) -> None:
    """It is missed where the tokenizer adds it, a column tells documents and they share no end."""
    random_ = random.Random(0)
    rows = [[random_.randrange(97, 123) for _ in range(20 + row)] + ending for row in range(60)]
    own = {"seq_lengths": [[8, len(one) - 8] for one in rows], "labels": rows}[column]
    if ending:
        rows = [one[:7] + ending + one[8:] for one in rows]
    path = _parquet(pa.table({"input_ids": rows, column: own}), tmp_path)
    findings = audited(path, "-t", "bytes")["findings"]
    told = [(one["severity"], one["rows"]) for one in findings if one["rule"] == "no-eos"]
    assert told == ([("warning", 60)] if column == "seq_lengths" and not ending else [])


@pytest.mark.usefixtures("folder")
def test_views_tokenized_directories_and_exports_of_packer_are_sound() -> None:
    Path("a.jsonl").write_bytes(text_lines(*random_texts(200)))
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    command = ["pack", "tokens", "-l", 64, "-q", "-o"]
    succeeds(*command, "view", "--view")
    succeeds(*command, "rows")
    expected = audited("rows")
    for name, kind in (("view", "packer"), ("tokens", "packer-tokenized")):
        report = audited(name)
        assert (report["format"], found(report)) == (kind, {})
        assert report["tokens"] == expected["tokens"]
    for to in ("trl", "llamafactory", "megatron-bridge", "numpy", "parquet", "unpacked", "axolotl",
               "megatron"):  # fmt: skip
        succeeds("export", "rows", "--to", to, "-o", f"to-{to}", "-q")
        report = audited(f"to-{to}", *["-l", "64"] * (to == "axolotl"))
        own = found(report)
        if to == "unpacked":  # nothing predicts the first token of a piece, be it EOS
            own.pop("eos-untrained", None)
        own.pop("duplicate-rows", None)  # empty texts and other short ones
        assert own == {}, (to, own)
        assert report["tokens"] >= expected["tokens"], to


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.usefixtures("folder")
def test_what_an_export_puts_between_segments_is_no_text(tokenizer: str, multiple: int) -> None:
    """Megatron-Bridge's segments have a target more, and padding that is most of the tokens. Both
    may be EOS, and neither is what documents end with.
    """
    config = {"bos_token": tiny_tokenizers.BOS, "eos_token": tiny_tokenizers.EOS}
    tiny_tokenizers.save(Path("own"), tiny_tokenizers.byte_level(), tokenizer_config=config)
    Path("a.jsonl").write_bytes(text_lines(*[f"{one}." for one in random_texts(300)]))
    command = ["pack", "a.jsonl", "-t", tokenizer, "-l", 128, "--segment-multiple", multiple]
    succeeds(*command, "-q", "-o", "rows")
    succeeds("export", "rows", "--to", "megatron-bridge", "-q", "-o", "out")
    for options in ([], ["-t", tokenizer]):
        report = audited("out", *options)
        assert found(report).keys() <= {"duplicate-rows"}
        assert {"no-eos", "cut", "eos-untrained"}.isdisjoint(report["not_applied"])


@pytest.mark.parametrize("eos", [True, False])
def test_documents_of_megatron_bridge_itself(tmp_path: Path, eos: bool) -> None:
    """Their last token is a target, and it is trained: no padding follows."""
    sets = conversations(1)
    missing = set() if eos else DEFECTS["no-eos"](sets, 1)
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for row in range(len(sets.rows)):
        documents = sets.rows[row]
        columns["input_ids"].append(sets.ids(row))
        columns["loss_mask"].append(
            [flag for one in documents for flag in [*map(int, one.trained[1:]), 0]]
        )
        columns["seq_start_id"].append([0, *np.cumsum(sets.lengths(row))[:-1].tolist()])
    report = audited(_parquet(pa.table(columns), tmp_path))
    assert report["format"] == "megatron-bridge"
    assert found(report) == ({} if eos else {"no-eos": len(missing)})
    assert "no-eos" not in report["not_applied"]


@pytest.mark.usefixtures("folder")
def test_documents_that_packer_truncates_are_cut() -> None:
    Path("a.jsonl").write_bytes(text_lines(*random_texts(99)))
    command = ["pack", "a.jsonl", "-l", 64, "-t", "bytes", "-q", "-o", "out", "--json"]
    result = packer(*command, "--overlong", "truncate")
    cut = json.loads(result.stdout)["truncated_documents"]
    assert found(audited("out")) == {"cut": cut}


@pytest.mark.parametrize("options", [[], ["--sample", 20]])
def test_a_cut_is_a_note_where_nothing_tells_whether_it_goes_on(
    tmp_path: Path, options: list[object]
) -> None:
    """Without BOS, or of a sample with it, a piece of a split document looks like a cut one."""
    sets = conversations(1)
    rows = DEFECTS["cut"](sets, 1)
    if not options:
        for _, one in sets.documents():
            del one.ids[0], one.trained[0]
            one.ids.append(EOS) if one.ids[-1] == EOS else one.ids.append(FIRST)
            one.trained.append(True)
    else:
        DEFECTS["bos-missing"](sets, 1)
    trl(sets, tmp_path / "set")
    report = audited(tmp_path / "set", *options)
    notes = {one["rule"] for one in report["findings"]}
    assert rows
    assert "cut" in notes or options
    assert found(report) == {}


@pytest.mark.parametrize(("texts", "wrong"), [(0, 0), (1, 1), (40, 0)])
def test_texts_beside_prompts_have_nothing_masked(tmp_path: Path, texts: int, wrong: int) -> None:
    """Of prompts without headers, few that are all trained are told; not those of another kind."""
    random_ = random.Random(1)
    rows = [[random_.randrange(FIRST, IDS) for _ in range(20 + row)] + [EOS] for row in range(90)]
    begins = [1 if row < texts else 15 for row in range(len(rows))]
    labels = [[-100] * at + one[at:] for one, at in zip(rows, begins, strict=True)]
    report = audited(_parquet(pa.table({"input_ids": rows, "labels": labels}), tmp_path))
    assert found(report) == ({"all-trained": wrong} if wrong else {})


def test_the_only_full_row_may_end_without_eos(tmp_path: Path) -> None:
    """No two rows are as long, so nothing else tells how long a row is."""
    documents = [one for _, one in conversations(1, rows=80).documents()]
    lengths = {len(one.ids): [one] for one in documents}
    longest = lengths[max(lengths)][0]
    longest.ids[-1] = FIRST
    sets = Sets([*lengths.values()], [[] for _ in lengths])
    trl(sets, tmp_path / "set")
    report = audited(tmp_path / "set")
    assert found(report).keys() <= {"cut", "bos-missing"}
    assert {one["rule"]: one["rows"] for one in report["findings"]}["cut"] == 1


# --- what cannot be read


def _lengths(column: list[list[int]]) -> pa.Table:
    return pa.table({"input_ids": [[1, 2, 3, 4]] * 3, "seq_lengths": column})


def _parquet(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path / "a.parquet")
    return path / "a.parquet"


def _lines(path: Path, *rows: object) -> Path:
    (path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path / "a.jsonl"


def _odd_line(path: Path, usual: dict[str, object], odd: dict[str, object]) -> Path:
    rows = [{"input_ids": [1, 2], **(odd if row == 700 else usual)} for row in range(900)]
    return _lines(path, *rows)


UNREADABLE = {
    "no ids": (lambda path: _parquet(pa.table({"text": ["a"]}), path), "no input_ids, expected"),
    "lines of texts": (
        lambda path: _lines(path, {"question": "a", "answer": [{"b": 1}]}),
        "a.jsonl: no input_ids, expected a column input_ids with lists of integers; columns found: "
        "question, answer",
    ),
    "lines that are no objects": (lambda path: _lines(path, [1]), "row 0: Expected `object`"),
    "nulls": (lambda path: _parquet(pa.table({"input_ids": pa.array([[1, None], [2, 3]])}), path),
              "input_ids holds a null"),
    "negative lengths": (lambda path: _parquet(_lengths([[4], [-9, 13], [4]]), path),
                         "a.parquet: row 1: seq_lengths is [-9, 13], expected lengths that add up "
                         "to at most 4, the row's tokens"),
    "huge lengths": (lambda path: _parquet(_lengths([[1 << 62], [4], [4]]), path),
                     f"row 0: seq_lengths is [{1 << 62}], expected lengths that add up to"),
    "labels of other lengths": (
        lambda path: _parquet(pa.table({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3, 4]]}),
                              path),
        "row 1: labels has 2 values, expected 1, as many as input_ids",
    ),
    "starts beyond": (
        lambda path: _parquet(pa.table({"input_ids": [[1, 2]], "seq_start_id": [[0, 7]],
                                        "loss_mask": [[1, 1]]}), path),
        "row 0: seq_start_id is [0, 7], expected to ascend from 0 to at most 2, the row's tokens",
    ),
    "huge ids": (lambda path: _lines(path, {"input_ids": [1, 1 << 64]}),
                 "Failed to convert JSON to int64"),
    "no rows": (lambda path: _parquet(pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))}),
                                      path), "has no rows"),
    "lines with a column more": (lambda path: _odd_line(path, {}, {"labels": [1, 2]}),
                                 "row 700: has labels, expected the columns of row 0"),
    "lines with a column less": (lambda path: _odd_line(path, {"labels": [1, 2]}, {}),
                                 "row 700: has no labels, expected the columns of row 0"),
    "lines with null": (lambda path: _odd_line(path, {"labels": [1, 2]}, {"labels": None}),
                        "row 700: has no labels"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, what: str) -> None:
    make, message = UNREADABLE[what]
    path = make(tmp_path)
    assert_error(packer("audit", path), 2, message)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json"])
def test_compressed_lines_and_arrays_are_read(tmp_path: Path, name: str) -> None:
    sets = conversations(1)
    assert DEFECTS["eos-untrained"](sets, 1)
    jsonl(Sets([[one] for _, one in sets.documents()]), tmp_path / "plain")
    expected, content = audited(tmp_path / "plain.jsonl"), (tmp_path / "plain.jsonl").read_bytes()
    if name.endswith(".json"):
        content = b"[%b]" % b",".join(content.splitlines())
    else:
        content = COMPRESSORS[name.rpartition(".")[2]](content)
    (tmp_path / name).write_bytes(content)
    assert audited(tmp_path / name) == expected
    assert "eos-untrained" in found(expected)


def test_errors_count_rows_of_the_set(tmp_path: Path) -> None:
    lengths = [[4]] * 40
    path = tmp_path / "set"
    path.mkdir()
    for name, own in (("a", lengths), ("b", [*lengths[:30], [5], *lengths[:9]])):
        table = pa.table({"input_ids": [[1, 2, 3, 4]] * 40, "seq_lengths": own})
        pq.write_table(table, path / f"{name}.parquet", row_group_size=7)
    assert_error(packer("audit", path), 2, "set: row 70: seq_lengths is [5], expected lengths")


@pytest.mark.usefixtures("folder")
def test_a_view_whose_tokens_have_moved() -> None:
    Path("a.jsonl").write_bytes(text_lines(*random_texts(50)))
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    succeeds("pack", "tokens", "-l", 64, "-q", "--view", "-o", "view")
    Path("tokens").rename("moved")
    result = packer("audit", "view")
    assert_error(result, 2, "its tokenized directory")
    assert "--tokens" in result.stderr
    assert found(audited("view", "--tokens", "moved")) == {}
    assert_error(packer("audit", "a.jsonl", "--tokens", "moved"), 2, "not a view of packer")


def test_files_that_are_not_listed_are_told(sound: Path) -> None:
    state = sound / "state.json"
    listed = json.loads(state.read_text())
    listed["_data_files"] = listed["_data_files"][:1]
    state.write_text(json.dumps(listed))
    told = [line for line in packer("audit", sound).stdout.splitlines() if "left out" in line]
    assert told == ["left out     data-1.arrow, which is not listed as a part of the set"]


def test_columns_that_are_left_out_are_told(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1, 2], [3, 4]], "labels": [[1.0, 2.0], [3.0, 4.0]]})
    kind = pq.read_schema(_parquet(table, tmp_path)).field("labels").type
    left_out = audited(tmp_path / "a.parquet")["left_out"]
    assert left_out == [f"column labels, since {kind} is not a list of integers"]


@pytest.mark.parametrize("pad", [0, 256])
def test_rows_padded_by_a_mask_are_documents(tmp_path: Path, pad: int) -> None:
    """All are as long, yet not full: EOS tells no boundaries of them."""
    random_ = random.Random(1)
    lengths = [random_.randint(5, 60) for _ in range(100)]
    documents = [[random_.randint(97, 122) for _ in range(one)] + [256] for one in lengths]
    rows = {
        "input_ids": [one + [pad] * (64 - len(one)) for one in documents],
        "labels": [one + [-100] * (64 - len(one)) for one in documents],
        "attention_mask": [[1] * len(one) + [0] * (64 - len(one)) for one in documents],
    }
    report = audited(_parquet(pa.table(rows), tmp_path), "-t", "bytes")
    assert (report["documents"], found(report)) == (100, {})


def test_names_that_stand_for_nothing(tmp_path: Path) -> None:
    assert_error(packer("audit", tmp_path / "gone"), 2, "no such file or directory")
    assert_error(packer("audit", tmp_path), 2, "no input files")
    (tmp_path / "pipe.parquet").symlink_to("/dev/zero")
    assert_error(packer("audit", tmp_path / "pipe.parquet"), 2, "not a regular file")
    (tmp_path / "pipe.npy").symlink_to("/dev/zero")
    assert_error(packer("audit", tmp_path / "pipe.npy", "-l", 8), 2, "pipe.npy")


def test_formats_are_named(tmp_path: Path, sound: Path) -> None:
    assert_error(packer("audit", sound, "--format", "tlr"), 2, "'tlr' is not one of")
    assert_error(packer("audit", sound, "--format", "megatron-bridge"), 2, "has no loss_mask")
    parquet(conversations(1), tmp_path / "other")
    report = audited(tmp_path / "other", "--format", "shifted")
    assert found(report)["labels-shifted"] == 40
    llamafactory(conversations(1), tmp_path / "two")
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert_error(packer("audit", tmp_path / "two"), 2, "has the splits train, test")
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": []}')
    assert_error(packer("audit", tmp_path / "two"), 2, "does not list splits")


@pytest.mark.parametrize("rounds", [60, heavy(1500)])
def test_damaged_files_end_in_a_line(tmp_path: Path, rounds: int) -> None:
    """Any byte of a file may be any other: it is read, or refused."""
    random_ = random.Random(0)
    sets = conversations(2, rows=6)
    bridge(sets, tmp_path / "bridge")
    trl(sets, tmp_path / "trl")
    jsonl(sets, tmp_path / "lines")
    files = [tmp_path / "bridge" / "packed.idx.parquet", tmp_path / "trl" / "data-0.arrow",
             tmp_path / "lines.jsonl"]  # fmt: skip
    told = list[tuple[str, str]]()
    for number in range(rounds):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        for _ in range(random_.randint(1, 4)):
            content[random_.randrange(len(content))] = random_.randrange(256)
        damaged = tmp_path / f"damaged{file.suffix}"
        damaged.write_bytes(content)
        try:
            audit(open_set(str(damaged)))
        except DataError as error:
            told.append((error.message, error.tip))
    assert all(tip and "\n" not in message for message, tip in told)


def test_urls(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    parquet(conversations(1), tmp_path / "set")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "set"), "/audited", recursive=True)
    assert found(audited("memory://audited")) == {}


# --- looking at it


def test_show_reads_rows_of_any_set(sound: Path) -> None:
    sets = conversations(1)
    shown = [
        json.loads(line) for line in packer("show", sound, 3, "-1", "--json").stdout.splitlines()
    ]
    for one, row in zip(shown, (3, 39), strict=True):
        assert (one["row"], one["padding"]) == (row, 0)
        ids = [[token for span in part["spans"] for token in span["ids"]]
               for part in one["segments"]]  # fmt: skip
        assert ids == [document.ids for document in sets.rows[row]]
        flags = [span["trained"] for part in one["segments"] for span in part["spans"]
                 for _ in span["ids"]]  # fmt: skip
        assert flags == [flag for document in sets.rows[row] for flag in document.trained]
    text = packer("show", sound, 0, "-t", "bytes").stdout
    assert "row 0 of 40" in text
    assert "\x1b" not in text


def test_show_of_ids_that_no_tokenizer_has(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))  # noqa: S106 no password
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = _lines(tmp_path, {"input_ids": [-1, 1, 1 << 40, 0, 1 << 62]})
    text = packer("show", path, "-t", tmp_path / "tokenizer.json").stdout
    assert f"<id-1>b<id{1 << 40}>a<id{1 << 62}>" in text.replace(" ", "")


def test_show_refuses_what_is_for_packer_alone(sound: Path) -> None:
    assert_error(packer("show", sound, "--tokens", "x"), 2, "--tokens")
    assert_error(packer("show", sound, 99), 2, "there is no row 99")


def _words(result: Any) -> str:
    return " ".join(result.stdout.split())


def test_files_of_tokens_are_read_together(tmp_path: Path) -> None:
    sets = conversations(1)
    rows = DEFECTS["no-eos"](sets, 1)
    sets = Sets([[one] for _, one in sets.documents()], [[] for _ in sets.documents()])
    for name in ("a", "b"):
        megatron(sets, tmp_path / name)
    report = audited(tmp_path)
    assert rows
    assert (report["format"], report["rows"]) == ("megatron", 2 * len(sets.rows))
    assert found(report)["duplicate-rows"] == len(sets.rows)
    (own,) = [one for one in report["findings"] if one["rule"] == "duplicate-rows"]
    count = len(sets.rows)
    told = [{"row": count + row, "place": 0, "earlier": row} for row in range(10)]
    assert own["examples"] == told
    assert f"row {count} is row 0, row {count + 1} is row 1" in _words(packer("audit", tmp_path))


def test_npy_windows(tmp_path: Path) -> None:
    np.arange(640, dtype="<u4").tofile(tmp_path / "part.npy")
    assert_error(packer("audit", tmp_path / "part.npy"), 2, "neither an array")
    assert audited(tmp_path / "part.npy", "--max-length", 64)["rows"] == 10
