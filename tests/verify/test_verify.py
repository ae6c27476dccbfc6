"""`packer verify`: whatever is wrong with a result is found and named, and nothing else is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers
from forging import Result
from support import COMPRESSORS, assert_error, jsonl, pack, packer, packer_process, shard_of

from packer_cli.inputs.delimited import CsvReader
from packer_cli.records import InputFile
from packer_cli.result.manifest import to_bytes
from packer_cli.tokenization.engines import BytesEngine

pytestmark = pytest.mark.usefixtures("folder")

TEXTS = [
    letter * length for letter, length in zip("abcdefgh", (15, 7, 3, 3, 9, 9, 40, 5), strict=True)
]
EVERYTHING = ("-l", 16, "--position-ids", "--segment-multiple", 4)
COLUMNS = (
    "input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids",
    "cu_seqlens_padded",
)  # fmt: skip


def first() -> str:
    """The name of the first shard, in which most tests do harm."""
    name: str = json.loads(Path("out/manifest.json").read_bytes())["shards"][0]["file"]
    return name


@pytest.fixture
def packed(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:4], ""))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", *EVERYTHING)
    return folder / "out"


@pytest.fixture
def many_shards(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 300)
    assert len(list(Path("out").glob("shard-*"))) > 3
    return folder / "out"


def problems(*options: object) -> list[str]:
    """The lines that verify prints; the exit code and stderr go with them."""
    result = packer("verify", "out", "-q", *options)
    lines: list[str] = result.stdout.splitlines()
    plural = "s" * (len(lines) != 1)
    assert result.exit_code == 1, result.stdout
    assert result.stderr.splitlines()[0] == f"error: out: {len(lines)} problem{plural}"
    assert result.stderr.splitlines()[1].startswith("tip: ")
    assert all(line.startswith("out: ") for line in lines)
    as_json = json.loads(packer("verify", "out", "-q", "--json", *options).stdout)
    assert not as_json["ok"]
    assert [f"out: {one['file']}: {one['problem']}" for one in as_json["problems"]] == lines
    return lines


def assert_sound(*options: object) -> str:
    result = packer("verify", "out", *options)
    assert (result.exit_code, result.stderr) == (0, ""), result.stdout
    assert ": sound" in result.stdout
    assert result.stdout.count("\n") == 1
    return str(result.stdout)


def rewrite(change: Callable[[dict[str, Any]], Any], *, signed: bool = True) -> None:
    """Change the manifest; `signed`: with a new checksum, as a forger would."""
    path = Path("out/manifest.json")
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(to_bytes(manifest) if signed else json.dumps(manifest).encode())


def forge(shard: Path, data: bytes) -> None:
    """Replace a shard, and all that is said of its bytes."""
    result = Result("out")
    result.write(shard.name, data)
    result.save()


def leaf_buffers(array: Any) -> list[Any]:
    return [buffer for buffer in array.buffers() if buffer is not None]


def position_in(data: pa.Buffer, buffer: Any) -> int:
    return int(buffer.address - data.address)


def changed(shard: Path, column: str, index: int, value: int, child: int = 0) -> bytes:
    """A shard with one number of a column changed: its leaf buffer number `child`."""
    data = bytearray(shard.read_bytes())
    whole = pa.py_buffer(data)
    with pa.ipc.open_stream(whole) as reader:
        values = reader.read_next_batch().column(column).values
    leaf = values.field(child) if isinstance(values, pa.StructArray) else values
    kind = leaf.to_numpy().dtype
    at = position_in(whole, leaf.buffers()[1])
    np.frombuffer(data, kind, count=len(leaf), offset=at)[index] = value
    return bytes(data)


def test_a_sound_result(packed: Path) -> None:
    assert assert_sound() == "out: 1 shard, 7 rows: sound\n"
    found = json.loads(packer("verify", "out", "--json").stdout)
    assert found == {
        "directory": "out", "ok": True, "problems": [], "shards": 1, "rows": 7, "tokens": 99,
        "bytes": (packed / first()).stat().st_size,
        "documents_compared": None, "inputs_compared": None,
        "records_drawn": None, "units_packed_again": None,
    }  # fmt: skip


def test_the_script_itself(packed: Path) -> None:
    result = packer_process("verify", "out")
    assert (result.returncode, result.stderr) == (0, b"")
    (packed / first()).unlink()
    result = packer_process("verify", "out")
    assert result.returncode == 1
    assert result.stdout == f"out: {first()}: is missing\n".encode()
    assert result.stderr.startswith(b"error: out: 1 problem\ntip: ")


@pytest.mark.parametrize(
    "options",
    [
        ["--columns", "input_ids,cu_seqlens"],
        ["--columns", "input_ids,cu_seqlens,segments"],
        ["--label-shift", "pre", "--segment-multiple", 4],
        ["--max-segments-per-row", 2, "--balance", "attention"],
        ["--overlong", "truncate", "--truncate-side", "left"],
        ["--overlong", "truncate"],
        ["--overlong", "drop", "--unit-bytes", 100],
        ["--strategy", "wrap"],
        ["--strategy", "wrap", "--segment-multiple", 8],
        ["--shard-bytes", 1, "--unit-bytes", 300, "--workers", 2],
        ["--no-eos"],
    ],
)
def test_every_way_to_pack_is_sound(folder: Path, options: list[object]) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, *options)
    assert_sound()
    for sample in ("all", 7):
        result = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert result.exit_code == 0, result.stdout
        if "--columns" not in options:
            count = 40 if sample == "all" else 7
            assert f"; {count} documents of 1 input encoded again: the same" in result.stdout


# --- shards


@pytest.mark.parametrize("column", COLUMNS)
def test_a_flipped_bit_in_every_column(packed: Path, column: str) -> None:
    shard = packed / first()
    good = shard.read_bytes()
    whole = pa.py_buffer(good)
    with pa.ipc.open_stream(whole) as reader:
        buffers = leaf_buffers(reader.read_next_batch().column(column))
    for buffer in buffers:
        data = bytearray(good)
        data[position_in(whole, buffer)] ^= 1
        shard.write_bytes(data)
        found = problems()
        assert any(
            re.match(f"out: {first()}: its sha256 is \\w+, the manifest", one) for one in found
        )
        if column not in ("input_ids", "segments"):  # only --against-inputs sees those
            forge(shard, bytes(data))
            assert problems()
            forge(shard, good)


def test_a_flipped_bit_anywhere(packed: Path) -> None:
    shard = packed / first()
    good = shard.read_bytes()
    for at in range(0, len(good), 61):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        shard.write_bytes(data)
        assert any(f"{first()}: its sha256 is" in one for one in problems()), at


RULES = {
    "an id below zero": ("input_ids", 0, -1, 0, "input_ids holds a negative id: place 0 has -1"),
    "an id above all": (
        "input_ids", 1, 999, 0,
        "row 0: input_ids holds an id above the tokenizer's highest, 257: place 1 has 999",
    ),
    "a label": ("labels", 2, 7, 0, "labels holds neither the token nor -100: place 2"),
    "a first label": ("labels", 0, None, 0, "row 0: labels trains on padding or on a segment's"),
    "a mask": ("attention_mask", 0, 0, 0, "the boundaries: place 0 has 0, expected 1"),
    "a position": ("position_ids", 1, 5, 0, "position_ids does not restart in every segment"),
    "a boundary": ("cu_seqlens", -1, 40, 0, "row 6: cu_seqlens ends outside 1..16: 40"),
    "a padded boundary": ("cu_seqlens_padded", 0, 1, 0, "cu_seqlens_padded does not begin with 0"),
    "a file": ("segments", 0, 9, 0, "row 0: segments: file is not an input of its unit: 9"),
    "a source": ("segments", 0, -1, 1, "row 0: segments: position is negative: -1"),
    "a start": ("segments", 0, 3, 2, "has a piece from token 3, expected from 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_every_rule_names_the_value(packed: Path, case: str) -> None:
    column, index, value, child, message = RULES[case]
    shard = packed / first()
    if value is None:
        batch = next(iter(pa.ipc.open_stream(shard.read_bytes())))
        value = batch.column("input_ids").values[index].as_py()
    forge(shard, changed(shard, column, index, value, child))
    found = problems()
    assert any(one.startswith(f"out: {first()}: ") and message in one for one in found), found


def test_damaged_metadata(packed: Path) -> None:
    shard = packed / first()
    data = shard.read_bytes()
    forge(shard, data.replace(b'"pad_token_id": 257', b'"pad_token_id": 256'))
    assert problems() == [
        f"out: {first()}: its metadata has pad_token_id 256, the manifest says 257"
    ]
    forge(shard, data.replace(b'"pad_token_id": 257', b'"pad_token_id"  257'))
    assert "not a readable shard: metadata that is not JSON" in problems()[0]


def test_trained_tokens_that_were_untrained(packed: Path) -> None:
    """Rows that are sound, but not those of the manifest."""
    shard = packed / first()
    batch = next(iter(pa.ipc.open_stream(shard.read_bytes())))
    at = int(np.argmax(batch.column("labels").values.to_numpy() >= 0))
    forge(shard, changed(shard, "labels", at, -100))
    said = json.loads(Path("out/manifest.json").read_bytes())["trained_tokens"]
    assert problems() == [
        f"out: {first()}: holds {said - 1} trained_tokens, the manifest says {said}"
    ]


@pytest.mark.parametrize("forged", [False, True], ids=["cut", "and the manifest edited"])
def test_a_shard_cut_at_every_message_boundary(folder: Path, forged: bool) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 20))
    pack("a.jsonl", "-l", 16)
    shard = Path("out") / first()
    data = shard.read_bytes()
    source = pa.BufferReader(data)
    messages = pa.ipc.MessageReader.open_stream(source)
    edges = [source.tell() for _ in messages]
    for size in (0, *edges, len(data) - 8, len(data) - 1, 100, 3):
        if forged and size:
            forge(shard, data[:size])
            found = problems()
        else:
            shard.write_bytes(data[:size])
            found = problems()
            message = f"has {size} bytes, the manifest says {len(data)}"
            assert found == [f"out: {first()}: {message}"]
        assert all(f"out: {first()}: " in one for one in found[:1])


def test_a_missing_shard(many_shards: Path) -> None:
    shard = shard_of(many_shards, 1)
    shard.unlink()
    assert problems() == [f"out: {shard.name}: is missing"]


def test_swapped_shards(many_shards: Path) -> None:
    one, two = shard_of(many_shards), shard_of(many_shards, 1)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    found = problems()
    assert {line.split(": ")[1] for line in found} == {one.name, two.name}


def test_things_in_the_place_of_a_shard(packed: Path) -> None:
    shard = packed / first()
    shard.unlink()
    shard.mkdir()
    assert problems() == [f"out: {first()}: is not a regular file"]
    shard.rmdir()
    os.mkfifo(shard)
    for command in (["stats", "out", "--deep"], ["show", "out"]):
        assert_error(packer(*command), 1, f"out/{first()}: is not a regular file")
    assert problems() == [f"out: {first()}: is not a regular file"]


def test_a_shard_that_claims_compression(packed: Path) -> None:
    """Arrow would allocate what the buffers say they become."""
    shard = packed / first()
    with pa.ipc.open_stream(shard.read_bytes()) as reader:
        table = reader.read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    forge(shard, sink.getvalue().to_pybytes())
    assert problems() == [f"out: {first()}: not a readable shard: a compressed record batch"]
    assert_error(packer("show", "out"), 1, "not a readable shard: a compressed record batch")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff\xff\0\0\0\0", "not a readable shard: no schema"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "not a readable shard: "),
        (b"x" * 100, "not a readable shard: "),
    ],
    ids=["only the end", "a header of 2 GiB", "garbage"],
)
def test_things_that_are_no_stream(packed: Path, data: bytes, message: str) -> None:
    forge(packed / first(), data)
    assert any(one.startswith(f"out: {first()}: {message}") for one in problems())
    for command in (["stats", "out", "--deep"], ["show", "out"]):
        assert_error(packer(*command), 1, f"out/{first()}: {message}")


def test_columns_of_another_type(packed: Path) -> None:
    with pa.ipc.open_stream((packed / first()).read_bytes()) as reader:
        table = reader.read_all()
    names = table.schema.names
    wide = table["cu_seqlens"].cast(pa.list_(pa.int64()))
    for changed_table, message in (
        (table.set_column(names.index("cu_seqlens"), "cu_seqlens", wide), "cu_seqlens is list<"),
        (table.drop_columns(["labels"]), "has the columns input_ids, attention_mask, "),
        (table.append_column("more", table["segments"]), "an unknown column 'more'"),
    ):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, changed_table.schema) as writer:
            writer.write_table(changed_table)
        forge(packed / first(), sink.getvalue().to_pybytes())
        found = problems()
        assert any(f"out: {first()}: " in one and message in one for one in found), found


# --- files


def test_foreign_files(packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    (packed / "shard-00001-000.arrow").write_bytes(b"")
    (packed / "folder").mkdir()
    foreign = "a foreign file: the manifest does not list it"
    names = ("folder", "notes.txt", "shard-00001-000.arrow")
    assert problems() == [f"out: {name}: {foreign}" for name in names]


def test_a_work_folder_that_was_left(packed: Path) -> None:
    """As a power loss leaves it right after the end of a run: the result is whole."""
    (packed / ".packer").mkdir()
    result = packer("verify", "out")
    assert (result.exit_code, result.stdout) == (0, "out: 1 shard, 7 rows: sound\n")
    assert result.stderr.startswith("packer: out/.packer: of a run that is writing here, or that")
    assert "the next packer pack to this directory does" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
def test_side_files(packed: Path, name: str) -> None:
    data = (packed / name).read_bytes()
    (packed / name).write_bytes(data + b" ")
    (line,) = problems()
    assert line.startswith(f"out: {name}: its sha256 is ")
    assert line.endswith(f", the manifest says {hashlib.sha256(data).hexdigest()}")
    (packed / name).unlink()
    assert problems() == [f"out: {name}: is missing"]


def test_a_tampered_tokenizer(folder: Path) -> None:
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(),
        tokenizer_config={"eos_token": "</s>", "chat_template": "{{ messages }}"},
    )  # fmt: skip
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    assert packer("pack", "a.jsonl", "-l", 16, "-t", "tok", "-q", "-o", "out").exit_code == 0
    assert_sound("--against-inputs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = Path("out", name)
        good = path.read_bytes()
        path.write_bytes(good.replace(b"</s>", b"</x>"))
        (line,) = problems()
        assert line.startswith(f"out: {name}: its sha256 is ")
        path.write_bytes(good)
    assert_sound()


def test_a_tampered_rejected_file(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("good") + b"bad\n")
    pack("a.jsonl", "-l", 16, "--on-error", "skip")
    assert_sound("--against-inputs")
    Path("out/rejected.jsonl").write_bytes(b"")
    (line,) = problems()
    assert line.startswith("out: rejected.jsonl: its sha256 is ")


# --- the manifest

TOTALS = (
    "rows", "documents", "segments", "tokens", "trained_tokens", "padding_tokens", "utilization",
    "lower_bound_rows", "empty_documents", "rejected_records",
)  # fmt: skip
LOST = ("truncated_documents", "truncated_tokens", "dropped_documents", "dropped_tokens")


@pytest.mark.parametrize("name", [*TOTALS, *LOST])
def test_an_edited_total(packed: Path, name: str) -> None:
    edit = lambda manifest: manifest.update({name: manifest[name] + 1})  # noqa: E731
    before = Path("out/manifest.json").read_bytes()
    rewrite(edit, signed=False)
    found = problems()
    assert any(line.startswith("out: manifest.json: was edited: ") for line in found)
    if name in TOTALS:  # the others show in the checksum only
        Path("out/manifest.json").write_bytes(before)
        rewrite(edit)
        found = problems()
        assert any(re.match(f"out: manifest.json: {name}( is|:) ", line) for line in found), found


@pytest.mark.parametrize("name", ["rows", "segments", "tokens", "trained_tokens", "bytes"])
def test_an_edited_shard_entry(packed: Path, name: str) -> None:
    rewrite(lambda manifest: manifest["shards"][0].update({name: 5}))
    assert any(f"out: {first()}: " in line and "the manifest says 5" in line for line in problems())


@pytest.mark.parametrize("name", ["document_length", "row_fill", "segments_per_row"])
def test_an_edited_histogram(packed: Path, name: str) -> None:
    rewrite(lambda manifest: manifest["histograms"][name].reverse())
    assert any(f"out: manifest.json: {name}: [" in line for line in problems())


@pytest.mark.parametrize("name", ["documents", "tokens"])
def test_figures_moved_between_inputs(packed: Path, name: str) -> None:
    def move(manifest: dict[str, Any]) -> None:
        manifest["inputs"][0][name] -= 1
        manifest["inputs"][1][name] += 1

    rewrite(move)
    assert [line.split(":")[2] for line in problems()] == [
        f" {name} of the input a.jsonl", f" {name} of the input b.jsonl"
    ]  # fmt: skip


def test_a_wrong_digest(packed: Path) -> None:
    rewrite(lambda manifest: manifest["shards"][0].update(sha256="0" * 64))
    (line,) = problems()
    assert line.endswith("the manifest says " + "0" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["config"].update(seed=5), "was edited"),
        (lambda m: m["inputs"][0].update(path="c.jsonl"), "was edited"),
        (lambda m: m.pop("side_files"), "a foreign file"),
        (lambda m: m["shards"].append(m["shards"][0]), "names a shard twice"),
        (lambda m: m["shards"][0].update(unit=3), "is said to be of unit 3"),
        (lambda m: m["units"].clear(), "a shard is of a unit that is not among the units"),
        (lambda m: m["units"].append(m["units"][0]), "units are not in order"),
        (lambda m: m["inputs"].pop(), "a slice of an input that is not among the inputs"),
    ],
)
def test_other_edits(packed: Path, change: Callable[[Any], Any], message: str) -> None:
    rewrite(change, signed=False)
    assert any(message in line for line in problems())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["shards"][0].update(file="../a"), "damaged: Expected `str` matching regex"),
        (lambda m: m["shards"][0].pop("rows"), "damaged: Object missing required field `rows`"),
        (lambda m: m["config"].update(max_length=1 << 40), "damaged: Expected `int` <= 16777216"),
        (lambda m: m["config"].update(seed=-1), "damaged: config: --seed: -1 is not between"),
        (lambda m: m["config"].update(seed="x"), "damaged: config: Expected `int`"),
        (lambda m: m.update(rows=0), "damaged: Expected `int` >= 1 - at `$.rows`"),
    ],
)
def test_a_manifest_of_no_use(packed: Path, change: Callable[[Any], Any], message: str) -> None:
    rewrite(change)
    assert_error(packer("verify", "out"), 1, f"out/manifest.json: {message}")


def test_options_that_cannot_be(packed: Path) -> None:
    assert_error(packer("verify", "out", "--sample", "0"), 2, "--sample: '0' is not a positive")
    assert_error(packer("verify", "out", "--sample", "some"), 2, "--sample: 'some' is not")
    assert_error(packer("verify", "out", "--seed", "-1"), 2, "--seed: -1 is negative")
    assert_error(packer("verify", "elsewhere"), 2, "elsewhere: no such directory")


# --- the inputs

CHAT = "".join([
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "{% if add_generation_prompt %}<assistant>{% endif %}",
])  # fmt: skip
SHAPES: dict[str, tuple[list[dict[str, Any]], list[object]]] = {
    "text": ([{"text": text} for text in TEXTS], []),
    "another field": ([{"body": text} for text in TEXTS], ["--text-field", "body"]),
    "separator": ([{"text": text} for text in TEXTS], ["--separator", "\n", "--no-eos"]),
    "messages": (
        [{"messages": [{"role": "user", "content": f"q{i}"},
                       {"role": "assistant", "content": "a" * i}]} for i in range(1, 30)],
        [],
    ),
    "long messages": (
        [{"messages": [{"role": role, "content": str(i) * 5} for role in ("user", "assistant") * 3]}
         for i in range(9)],
        ["--overlong", "truncate-turns"],
    ),
    "messages cut": (
        [{"messages": [{"role": "user", "content": "q" * 50},
                       {"role": "assistant", "content": "a" * 50}]} for i in range(3)],
        ["--overlong", "split", "--force-split", "--keep-untrained"],
    ),
    "prompts": (
        [{"prompt": f"p{i} ", "completion": "c" * i} for i in range(9)], ["--label-shift", "pre"],
    ),
    "alpaca": (
        [{"instruction": "add", "input": str(i), "output": "o" * i} for i in range(9)],
        ["-l", 512],
    ),
    "tokens": (
        [{"input_ids": [1, 2, 3 + i], "labels": [-100, 2, 3 + i]} for i in range(9)], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sample", ["all", "4"])
def test_every_shape_against_its_inputs(folder: Path, shape: str, sample: str) -> None:
    records, options = SHAPES[shape]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(), tokenizer_config={"eos_token": "</s>"}
    )
    (folder / "t.jinja").write_text(CHAT)
    template = ["--chat-template", "t.jinja"] if "messages" in shape else []
    result = packer(
        "pack", "a.jsonl", "-l", 64, "-t", "tok", *template, *options, "-q", "-o", "out"
    )
    assert result.exit_code == 0, result.stderr
    shutil.rmtree(folder / "tok")  # the directory has all that is needed
    (folder / "t.jinja").unlink()
    text = assert_sound("--against-inputs", "--sample", sample)
    documents = len(records) if sample == "all" else min(4, len(records))
    assert f"; {documents} documents of 1 input encoded again: the same" in text


def write_parquet(path: str, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=3)


def write_arrow(path: str, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


FORMATS: dict[str, Callable[[str, list[str]], Any]] = {
    "a.jsonl": lambda path, texts: Path(path).write_bytes(jsonl(*texts)),
    "a.jsonl.gz": lambda path, texts: Path(path).write_bytes(COMPRESSORS["gz"](jsonl(*texts))),
    "a.txt": lambda path, texts: Path(path).write_text("".join(t + "\n" for t in texts)),
    "a.csv": lambda path, texts: Path(path).write_text("text\n" + "".join(t + "\n" for t in texts)),
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sample", ["all", "5"])
def test_every_format_against_its_inputs(folder: Path, name: str, sample: str) -> None:
    FORMATS[name](name, TEXTS * 3)
    pack(name, "-l", 16, "--unit-bytes", 100)
    count = 24 if sample == "all" else 5
    text = assert_sound("--against-inputs", "--sample", sample)
    assert f"; {count} documents of 1 input encoded again: the same" in text


def test_a_sample_is_encoded_in_few_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes as long to begin with a text as to encode it."""
    lines = [jsonl(f"{i} " + "x" * 50) for i in range(400)]
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    pack("a.jsonl", "-l", 256, "--overlong", "drop")
    calls, encode = list[int](), BytesEngine.encode

    def counted(engine: BytesEngine, texts: list[str]) -> Any:
        calls.append(len(texts))
        return encode(engine, texts)

    monkeypatch.setattr(BytesEngine, "encode", counted)
    assert "300 documents of 1 input encoded again" in assert_sound(
        "--against-inputs", "--sample", 300
    )
    assert len(calls) < 10
    assert sum(calls) >= 300


def test_a_sample_is_spread_over_the_files(folder: Path) -> None:
    for number, count in enumerate((1, 2, 100, 100)):
        (folder / f"{number}.jsonl").write_bytes(jsonl(*TEXTS[:1] * count))
    pack(*(f"{number}.jsonl" for number in range(4)), "-l", 16, "--unit-bytes", 500)
    for sample, count in ((10, 10), (2, 2), (60, 60), (1000, 203)):
        text = assert_sound("--against-inputs", "--sample", sample, "--seed", 3)
        assert f"; {count} documents of 4 inputs encoded again" in text


def test_files_without_a_share_of_the_sample_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (folder / f"{number}.csv").write_text(f"text\nrecord {number}\n")
    pack(*(f"{number}.csv" for number in range(20)), "-l", 16)
    files, read = list[str](), CsvReader.read

    def noted(self: CsvReader, file: InputFile, *rest: Any, **options: Any) -> Any:
        files.append(file.path)
        return read(self, file, *rest, **options)

    monkeypatch.setattr(CsvReader, "read", noted)
    assert_sound("--against-inputs", "--sample", 2)
    assert len(set(files)) == 4  # two documents of the rows, and a record of two other files


def test_changed_inputs(packed: Path) -> None:
    path = Path("a.jsonl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"bbb", b"bxb"))
    (line,) = problems("--against-inputs")
    assert line.startswith("out: a.jsonl: its sha256 is ")
    assert line.endswith(f"it was {hashlib.sha256(data).hexdigest()} when it was packed")
    path.write_bytes(data + b"\n")
    message = f"has {len(data) + 1} bytes, it had {len(data)} when it was packed"
    assert problems("--against-inputs") == [f"out: a.jsonl: {message}"]
    path.rename("elsewhere")
    (line,) = problems("--against-inputs")
    assert line == "out: a.jsonl: an input: cannot read: No such file or directory"
    assert_sound()


def repacked_input(data: bytes) -> None:
    """Change an input, and what the manifest says of it."""
    Path("a.jsonl").write_bytes(data)
    result = Result("out")
    result.manifest["inputs"][0].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    result.save()


@pytest.mark.parametrize("sample", ["all", "1000"])
def test_documents_that_are_not_those_of_the_inputs(folder: Path, sample: str) -> None:
    options = ["--against-inputs", "--sample", sample]
    (folder / "a.jsonl").write_bytes(jsonl("one", "two", "three"))
    pack("a.jsonl", "-l", 16, "--no-shuffle", "--strategy", "next-fit")
    repacked_input(jsonl("one", "twx", "three"))
    assert problems(*options) == [
        "out: a.jsonl: line 2 (byte 16): input_ids has 111 at place 6 of row 0 of "
        f"{first()}, 120 expected when encoded again"
    ]
    repacked_input(jsonl("one", "twoo", "three"))
    found = problems(*options)
    assert found[0] == (
        "out: a.jsonl: line 2 (byte 16): is packed as 0-4 of its tokens, 0-5 expected when "
        "encoded again"
    )
    assert any("no document begins there, 1 like this" in line for line in found)
    repacked_input(jsonl("one", "two", "three", "four"))
    if sample == "all":  # what is not in the shards cannot be in a sample of them
        assert problems(*options) == [
            "out: a.jsonl: line 4 (byte 50): is packed as none of its tokens, 0-5 expected when "
            "encoded again"
        ]


def test_a_label_that_was_untrained(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("one", "two"))
    pack("a.jsonl", "-l", 16, "--no-shuffle", "--strategy", "next-fit")
    shard = Path("out") / first()
    forge(shard, changed(shard, "labels", 1, -100))

    result = Result("out")
    result.add("trained_tokens", -1)
    result.manifest["shards"][0]["trained_tokens"] -= 1
    result.save()
    assert_sound()
    assert problems("--against-inputs") == [
        f"out: a.jsonl: line 1 (byte 0): labels has -100 at place 1 of row 0 of {first()}, 110 "
        "expected when encoded again"
    ]


def test_stdin_cannot_be_read_again(folder: Path) -> None:
    result = packer_process("pack", "-", "-l", 16, "-q", "-o", "out", stdin=jsonl(*TEXTS))
    assert result.returncode == 0, result.stderr
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 0
    assert "-: came from stdin, which cannot be read again: not compared" in result.stderr
    assert "0 documents of 0 inputs" in result.stdout


def test_a_broken_result_is_not_compared(packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 1
    assert "not compared with the inputs: the result itself has problems" in result.stderr
