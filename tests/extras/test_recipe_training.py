"""A recipe over the files of ../shared: text, code, conversations, Alpaca records and prompts in
given shares, with a validation split; opened by `datasets`, and trained on as documents alone are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from recipes import pack_sources
from support import check_directory
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from packer_cli.config.documents import DocumentConfig
from packer_cli.result.manifest_file import load
from packer_cli.torch import (
    PackedDataset,
    PackedSampler,
    padded_collate,
    varlen_collate,
)

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
TOKENIZER = SHARED / "tokenizers" / "mistral_v3"
FILES = {
    "text": "text_wikitext2_lines",
    "code": "code_python",
    "chat": "chat_oasst_en100",
    "alpaca": "sft_gpteacher",
    "prompts": "sft_gsm8k_train",
}
SHARES = {"text": 0.15, "code": 0.55, "chat": 0.05, "alpaca": 0.15, "prompts": 0.1}
TOKENS, L = 3_000_000, 512
COLUMNS = ["input_ids", "labels", "cu_seqlens", "source"]

pytestmark = pytest.mark.skipif(not TOKENIZER.is_dir(), reason="../shared is not there")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Such a small model only waits for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module", params=["packed", "view"])
def mixed(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The recipe's two directories; what is tokenized for the first way is there for the second."""
    files = {name: SHARED / "data" / f"{file}.jsonl.zst" for name, file in FILES.items()}
    return pack_sources(
        folder / request.param, files,
        {name: {"weight": share, "max_epochs": 2.0} for name, share in SHARES.items()},
        {name: DocumentConfig() for name in files}, str(TOKENIZER),
        {"tokens": TOKENS, "validation_share": 0.01}, folder / "tokens", max_length=L,
        view=request.param == "view",
    )  # fmt: skip


def test_datasets_opens_both_sides(mixed: Path) -> None:
    loaded = datasets.load_from_disk(str(mixed))
    assert isinstance(loaded, datasets.DatasetDict)
    assert list(loaded) == ["train", "validation"]
    for part, theirs in loaded.items():
        check_directory(mixed / part)
        ours = PackedDataset(mixed / part, COLUMNS)
        assert len(ours) == len(theirs) > 100
        for row in (0, len(ours) // 2, len(ours) - 1):
            assert ours[row]["cu_seqlens"].tolist() == theirs[row]["cu_seqlens"]
        if "input_ids" in theirs.column_names:  # a view has references to tokens
            rows = [0, len(ours) // 2, len(ours) - 1]
            batches = [
                varlen_collate(some, config=None, names=["input_ids", "labels", "seq_idx"])
                for some in ([theirs[row] for row in rows], ours.__getitems__(rows))
            ]
            assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


def test_sources_have_their_shares(mixed: Path) -> None:
    dataset, counts = PackedDataset(mixed / "train", COLUMNS), np.zeros(len(SHARES))
    assert dataset.sources == tuple(SHARES)
    for begin in range(0, len(dataset), 64):
        rows = dataset.__getitems__(range(begin, min(begin + 64, len(dataset))))
        sources = padded_collate(rows, config=None)["source_ids"]
        counts += np.bincount(sources[sources >= 0].numpy(), minlength=len(counts))
    assert np.abs(counts / counts.sum() - [*SHARES.values()]).max() < 0.001


class Unpacked:
    """Documents as the tokenized directories have them, read by `datasets`: no row is looked at."""

    def __init__(self, directory: Path) -> None:
        self._rows = datasets.load_from_disk(str(directory))
        self._inputs = [str(Path(one.path).parent) for one in load(directory).inputs]
        self._opened: dict[int, Any] = {}

    def of(self, row: int) -> Iterator[tuple[Any, Any]]:
        """(ids, labels) of each segment of a row, -100 where it is not trained on."""
        content = self._rows[row]
        lengths = np.diff(content["cu_seqlens"])
        for segment, length in zip(content["segments"], lengths, strict=True):
            number = segment["file"]
            if number not in self._opened:
                self._opened[number] = datasets.load_from_disk(self._inputs[number])
            document = self._opened[number][segment["position"]]
            ids = np.array(document["input_ids"])
            spans = document.get("trained")
            trained = np.full(len(ids), spans is None)
            for begin, end in zip((spans or [])[::2], (spans or [])[1::2], strict=True):
                trained[begin:end] = True
            here = slice(segment["start"], segment["start"] + length)
            labels = np.where(trained, ids, -100)[here]
            labels[0] = -100
            yield torch.tensor(ids[here]), torch.tensor(labels)


def model_of(vocabulary: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=L,
        )
    ).train()  # fmt: skip


def token_losses(logits: Any, labels: Any) -> Any:
    """[tokens - 1], the loss of each next token, 0 where it is not trained on."""
    return cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")


def packed_losses(model: Any, batch: dict[str, Any]) -> list[Any]:
    """The losses of the tokens of each document, as `Unpacked` has them one after another."""
    sources = batch["document_sources"].tolist()
    logits, edges = model(**batch).logits, batch["cu_seq_lens_q"].tolist()
    documents = [slice(begin, end) for begin, end in pairwise(edges)]
    return [
        token_losses(logits[:, here], batch["labels"][:, here])
        for here, source in zip(documents, sources, strict=True)
        if source >= 0  # the padding is none
    ]


def alone(model: Any, documents: Any) -> list[Any]:
    return [
        token_losses(model(input_ids=ids[None], use_cache=False).logits, labels[None])
        for ids, labels in documents
    ]


def test_documents_have_the_losses_that_they_have_alone(mixed: Path) -> None:
    """Of both splits two rows with documents of each source."""
    for part in ("train", "validation"):
        dataset, unpacked = PackedDataset(mixed / part, COLUMNS), Unpacked(mixed / part)
        model, seen = model_of(vocabulary_of(mixed)), set()
        collate = partial(varlen_collate, config=model.config)
        with torch.no_grad():
            for row in rows_of_each_source(mixed / part):
                batch = collate(dataset.__getitems__([row]))
                seen |= set(batch["document_sources"].tolist()) - {-1}
                found, expected = packed_losses(model, batch), alone(model, unpacked.of(row))
                assert len(found) == len(expected)
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert seen == set(range(len(SHARES)))


def rows_of_each_source(directory: Path, most: int = 2) -> list[int]:
    dataset, found = PackedDataset(directory, "source"), set()
    sources = dataset.__getitems__(range(len(dataset))).ragged["source"]
    for number in range(len(SHARES)):
        found |= set([row for row in range(len(dataset)) if number in sources[row]][-most:])
    return sorted(found)


def vocabulary_of(directory: Path) -> int:
    tokenizer = load(directory / "train").tokenizer
    assert tokenizer is not None
    return tokenizer.vocab_size


def mean(losses: list[Any], labels: list[Any]) -> Any:
    return torch.cat(losses).sum() / sum(int((one[1:] != -100).sum()) for one in labels)


def test_training_on_rows_is_training_on_documents(mixed: Path) -> None:
    """Three steps of two models, of which one never sees a row."""
    dataset, unpacked = PackedDataset(mixed / "train", COLUMNS), Unpacked(mixed / "train")
    ours, theirs = model_of(vocabulary_of(mixed)), model_of(vocabulary_of(mixed))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs)]
    order = list(PackedSampler(dataset, seed=1))
    loader = DataLoader(
        dataset, 2, sampler=PackedSampler(dataset, seed=1), num_workers=1,
        collate_fn=partial(varlen_collate, config=ours.config),
    )  # fmt: skip
    losses = []
    for step, batch in zip(range(3), loader, strict=False):
        documents = [one for row in order[2 * step : 2 * step + 2] for one in unpacked.of(row)]
        packed = ours(**batch).loss
        separate = mean(alone(theirs, documents), [labels for _, labels in documents])
        assert packed.item() == pytest.approx(separate.item(), abs=1e-5)
        losses.append(packed.item())
        for loss, optimizer in zip((packed, separate), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(set(losses)) == 3
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
