"""Documents as they are written are those that are read, however batches are put together."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from packer_cli.records import TokenBatch
from packer_cli.result.shard_writer import DocumentWriter, documents_schema

_BATCHES = (
    (600_000, 700_000),  # put together
    (1_200_000,),  # enough by itself
    (10, 20, 1_048_576),  # put together in the same memory
    (900_000, 2_500_000),  # more than that holds
    (5,),  # the last
)


def _batch(tokens: int, chance: np.random.Generator, first: int) -> TokenBatch:
    """Documents of 0 to 9999 tokens, the last as long as it must be; some are empty."""
    edges = [0]
    while edges[-1] < tokens:
        length = 0 if chance.random() < 0.1 else int(chance.integers(1, 10_000))
        edges.append(min(edges[-1] + length, tokens))
    count = len(edges) - 1
    return TokenBatch(
        chance.integers(0, 128_000, tokens).astype(np.uint32),
        np.array(edges, np.int64),
        None,
        np.zeros(count, np.int32),
        np.arange(first, first + count),
    )


def test_documents_are_those_written(tmp_path: Path) -> None:
    chance = np.random.default_rng(7)
    writer = DocumentWriter(tmp_path, 0, 1 << 40, documents_schema("0" * 64, has_trained=False))
    expected, ids = list[tuple[int, int]](), list[np.ndarray]()  # (position, tokens) of documents
    for tokens in (tokens for group in _BATCHES for tokens in group):
        batch = _batch(tokens, chance, expected[-1][0] + 1 if expected else 0)
        lengths = np.diff(batch.offsets)
        kept = lengths > 0
        expected += zip(batch.position[kept].tolist(), lengths[kept].tolist(), strict=True)
        ids.append(batch.ids.copy())
        writer.write(batch)
    shard = writer.close()[0]
    with pa.memory_map(str(tmp_path / shard.file)) as source:
        batches = list(pa.ipc.open_stream(source))
    assert [len(b["input_ids"].flatten()) for b in batches] == [sum(group) for group in _BATCHES]
    table = pa.Table.from_batches(batches)
    lengths = table["input_ids"].combine_chunks().value_lengths().to_pylist()
    assert list(zip(table["position"].to_pylist(), lengths, strict=True)) == expected
    written = table["input_ids"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(written, np.concatenate(ids).view(np.int32))
