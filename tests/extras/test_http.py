"""Inputs and results at http://: whatever a server does wrong, the right rows or one error."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import http_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from http_server import Answer, Server
from support import (
    assert_error,
    contents,
    jsonl,
    packer,
    random_ids,
    recover_texts,
    succeeds,
)
from torch.utils.data import DataLoader

from packer_cli import storage
from packer_cli.errors import DataError
from packer_cli.torch import PackedDataset

TEXTS = [f"text {i} " + "ab" * (i % 50) for i in range(2000)]
OPTIONS = ("-l", 64, "-t", "bytes", "-q", "--unit-bytes", 20_000, "--workers", 2, "-o", "out")
FORMS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(jsonl(*TEXTS)),
    "a.parquet": lambda path: pq.write_table(
        pa.table({"text": TEXTS}), path, row_group_size=300, compression="none"
    ),
}


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Of an empty folder."""
    monkeypatch.setattr(storage, "_typed", {})
    (folder / "there").mkdir()
    with http_server.serving(folder / "there") as server:
        yield server


def later(change: Callable[[Answer], Any]) -> Callable[[Answer], None]:
    """From the third request for a file on."""
    return lambda answer: change(answer) if answer.number > 1 else None


def other(answer: Answer) -> None:
    answer.of(answer.whole.replace(b"a", b"Z"), '"later"')


def other_span(answer: Answer) -> None:
    answer.says(7 if answer.begin == 0 else 0, len(answer.whole))


def cut_short(answer: Answer) -> None:
    answer.cut = len(answer.body) // 2


def compressed(answer: Answer) -> None:
    answer.becomes(200, gzip.compress(answer.whole), **{"Content-Encoding": "gzip"})


CHANGED = " changed"
# what a server does wrong, and what the error says
FAULTS: dict[str, tuple[Callable[[Answer], Any], str]] = {
    "another version": (later(other), CHANGED),
    "another span": (later(other_span), "were requested"),
    "no ranges": (later(lambda answer: answer.becomes(200, answer.whole)), "were requested"),
    "cut short": (later(cut_short), "cannot read: "),
    "403": (lambda answer: answer.becomes(403), "403 Forbidden"),
    "404": (later(lambda answer: answer.becomes(404)), "no such file"),
    "gzip": (compressed, "the server compresses what it sends"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_errs(server: Server, form: str, fault: str) -> None:
    """An error keeps nothing that is wrong: the same command goes on once the server is well."""
    FORMS[form](server.folder / form)
    server.fault, message = FAULTS[fault]
    result = packer("pack", f"{server.url}/{form}", *OPTIONS)
    assert_error(result, 1, f"{server.url}/{form}: ", message)
    assert not Path("out/manifest.json").exists()
    server.fault = None
    succeeds("pack", f"{server.url}/{form}", *OPTIONS)
    assert recover_texts("out") == TEXTS


@pytest.mark.parametrize("status", [206, 416])
def test_a_part_that_the_server_does_not_name_is_not_read(server: Server, status: int) -> None:
    """Nor is what a server says of an error the content of a file."""

    def part(answer: Answer) -> None:
        answer.status, answer.body = status, b"<h1>no such range</h1>"
        answer.headers.pop("Content-Range")

    (server.folder / "a.txt").write_text("text\n")
    server.fault = part
    result = packer("pack", f"{server.url}/a.txt", *OPTIONS)
    assert_error(result, 1, "a.txt: ", "the server does not name the part it sends")


@pytest.mark.parametrize("etag", ['W/"first"', None])
@pytest.mark.parametrize("form", FORMS)
def test_a_server_that_says_little(server: Server, form: str, etag: str | None) -> None:
    def change(answer: Answer) -> None:
        answer.headers.pop("ETag")
        answer.headers |= {"ETag": etag} if etag and answer.number % 2 else {}

    FORMS[form](server.folder / form)
    server.fault = change if etag is None else None
    (server.folder / "empty.jsonl").write_bytes(b"")
    succeeds("pack", f"{server.url}/{form}", f"{server.url}/empty.jsonl", *OPTIONS)
    assert recover_texts("out") == TEXTS


def test_a_request_that_hangs_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 0.1)
    FORMS["a.jsonl"](server.folder / "a.jsonl")
    for hangs in (lambda number: True, lambda number: number > 1):

        def wait(answer: Answer, hangs: Callable[[int], bool] = hangs) -> None:
            answer.wait = 5 * hangs(answer.number)

        server.fault = wait
        server.asked.clear()
        result = packer("pack", f"{server.url}/a.jsonl", *OPTIONS)
        said = f"{server.url}/a.jsonl: cannot read: no answer within 0.1 seconds"
        assert_error(result, 1, said)


@pytest.mark.parametrize(
    "address", ["https://127.0.0.1:{}", "http://127.0.0.1:9", "http://no-such-host.invalid"]
)
def test_what_cannot_be_reached(server: Server, address: str) -> None:
    """Encryption that fails, a port that nobody listens at, a name that nobody has."""
    url = address.format(server.url.rpartition(":")[2])
    result = packer("pack", f"{url}/a.jsonl", *OPTIONS)
    assert_error(result, 1, f"{url}/a.jsonl: cannot read: ")
    with pytest.raises(DataError, match=f"{url}/manifest.json: cannot read: "):
        PackedDataset(url)


# What opens a URL, and rows of results

KEY = "us3r:pa55word", "X-Amz-Signature=51gnature&token=5econd"
SECRETS = (*KEY[0].split(":"), "51gnature", "5econd")


@pytest.fixture
def closed(server: Server) -> str:
    """The URL of inputs and a result, which opens with a password and a signature."""
    (server.folder / "a.jsonl").write_text(random_ids(400, longest=90) + "\n{bad\n")
    options = ("-l", 64, "-q", "--unit-bytes", "15K", "--on-error", "skip", "-o")
    assert packer("pack", server.folder / "a.jsonl", *options, "there/out").exit_code == 0
    server.key = KEY
    return f"{server.url.replace('://', f'://{KEY[0]}@')}/{{}}?{KEY[1]}"


def test_what_opens_a_url_is_told_nobody(server: Server, closed: str) -> None:
    """Other commands: tests/test_storage.py."""
    a = closed.format("a.jsonl")
    table = {
        ("pack", a, "-l", 64, "--on-error", "skip", "--max-errors", "10%", "-o", "out"): 0,
        ("pack", a, "-l", 64, "-o", "new", "--debug"): 1,
        ("pack", a.replace("51gnature", "51gnature2"), "-l", 64, "-o", "new", "--debug"): 1,
        ("pack", a.replace("127.0.0.1:", "127.0.0.1:9"), "-l", 64, "-o", "new", "--debug"): 1,
        ("stats", closed.format("out"), "--json"): 0,
    }
    for command, code in table.items():
        result = packer(*command)
        assert result.exit_code == code, (command, result.stderr)
        assert not [one for one in SECRETS if one in result.stdout + result.stderr], command
    for name, content in contents("out").items():
        assert not [secret for secret in SECRETS if secret.encode() in content], name
    assert f"{server.url}/a.jsonl".encode() in Path("out/rejected.jsonl").read_bytes()


def test_rows_by_loaders_of_several_processes(server: Server, closed: str) -> None:
    """Each shard is fetched once, and the second run asks for the manifest alone."""
    local, dataset = (
        PackedDataset(server.folder / "out"),
        PackedDataset(closed.format("out"), cache="cache"),
    )
    assert dataset.paths == (f"{server.url}/out",)
    assert dataset.fingerprint == local.fingerprint
    expected = local.__getitems__(range(len(local))).columns["input_ids"]
    for workers in (2, 0):
        again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
        loader = DataLoader(again, 7, num_workers=workers, collate_fn=ids)
        assert torch.equal(torch.cat(list(loader)), expected)
        shards = {name: count for name, count in server.asked.items() if name.endswith(".arrow")}
        assert (len(shards) > 5) == (workers > 0)
        assert {*shards.values()} <= {1}
        server.asked.clear()


def ids(batch: Any) -> Any:
    return batch.columns["input_ids"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_fetched(server: Server, closed: str, workers: int) -> None:
    dataset = PackedDataset(closed.format("out"), cache="cache")
    server.fault = lambda answer: answer.becomes(500) if "arrow" in answer.path else None
    with pytest.raises(DataError, match=r"cannot read: 500") as caught:
        list(DataLoader(dataset, 7, num_workers=workers, collate_fn=list))
    assert not [secret for secret in SECRETS if secret in str(caught.value)]
