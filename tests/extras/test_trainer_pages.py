"""docs/trainers/: every page runs as written, with a tiny `my-model`, in the trainer's own hands.

Commands and Python run in their order; what a page prints is what it shows. Where a page ends in a
configuration, the real trainer is given it. Whatever trains is held against the losses of the
documents computed one by one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import getsource
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import docs_runner
import numpy as np
import pytest
import torch
import yaml
from support import packer
from tiny_models import save_my_model
from trainer_imports import (
    allow_llamafactory,
    axolotl_batches,
    axolotl_prepared,
    bridge_datasets,
    olmo_data,
)
from transformers import LlamaForCausalLM

from packer_cli import open_packed
from packer_cli.grain import DocumentSource, PackedSource

ROOT = Path(__file__).parents[2]
# those of the trainers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")


@pytest.fixture(autouse=True)
def _reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory of a reader of the pages: sample_data, and a model called my-model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(ROOT / "sample_data", folder / "sample_data")
    save_my_model(folder)


def page(name: str) -> str:
    return docs_runner.page(f"docs/trainers/{name}")


def run_page(name: str, **given: Any) -> dict[str, Any]:
    """Run a page; what its Python named, its configuration as "yaml"."""
    text = page(name)
    for arguments in re.findall(r"^    energon (.*)$", text, re.M):
        script = Path(sys.executable).with_name("energon")
        subprocess.run([script, *arguments.split()], check=True, timeout=60)
    names = docs_runner.run(text, names=given)
    for code in re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S):
        names["yaml"] = yaml.safe_load(code)
    return names


def has_module(name: str) -> bool:
    """Whether a package is here, and this module is in it, as in its main branch."""
    package, _, inner = name.partition(".")
    return bool(find_spec(package)) and (not inner or bool(find_spec(name)))


def documents(ids: Any, labels: Any, positions: Any) -> Iterator[tuple[Any, Any]]:
    """(ids, labels) of each document of a batch."""
    for row in range(len(ids)):
        starts = [*np.flatnonzero(positions[row] == 0).tolist(), len(ids[row])]
        for begin, end in pairwise(starts):
            yield ids[row, begin:end], labels[row, begin:end]


@torch.no_grad()
def loss_alone(model: Any, batch: dict[str, Any]) -> float:
    """The mean loss of a batch's trained tokens, every document computed by itself."""
    total, count = 0.0, 0
    for ids, labels in documents(*(batch[n] for n in ("input_ids", "labels", "position_ids"))):
        if (trained := int((labels[1:] != -100).sum())) > 0:
            loss = model(input_ids=ids[None], labels=labels[None], use_cache=False).loss
            total, count = total + loss.item() * trained, count + trained
    assert count > 100
    return total / count


@torch.no_grad()
def assert_documents_are_apart(trainer: Any) -> None:
    """The loss of the trainer's own batches is that of their documents alone."""
    model = trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(list(documents(batch["input_ids"], batch["labels"], batch["position_ids"]))) >= 4
    assert "attention_mask" not in batch
    assert model(**batch).loss.item() == pytest.approx(loss_alone(model, batch), rel=1e-5)


@pytest.mark.parametrize("name", ["transformers.md", "trl.md"])
def test_trainers_of_hugging_face(name: str) -> None:
    assert_documents_are_apart(run_page(name)["trainer"])


@pytest.mark.parametrize("name", ["accelerate.md", "ddp.md"])
def test_loops_in_processes_train_on_the_same_sum(name: str, folder: Path) -> None:
    """Two processes with two micro-batches each, and one with four: the page's steps, with SGD."""
    pack_as_on(name)
    trained = [train_in_processes(name, folder, *how) for how in ((2, 2), (1, 4))]
    first = LlamaForCausalLM.from_pretrained("my-model").state_dict()
    for weight, value in trained[0].items():
        assert not torch.equal(value, first[weight])
        torch.testing.assert_close(value, trained[1][weight], rtol=1e-4, atol=1e-6)


def pack_as_on(name: str) -> None:
    (arguments,) = re.findall(r"^    packer (.*)$", page(name), re.M)
    assert packer(*arguments.split()).exit_code == 0


def code_of(name: str, changes: dict[str, str]) -> str:
    """The Python of a page, with other words for some."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", page(name), re.M | re.S)
    for written, tested in changes.items():
        assert written in code
        code = code.replace(written, tested)
    return str(code)


# torch may wait for ever when it frees what its processes had in common
THE_END = "\nimport os\nos._exit(0)\n"


def start(script: Path, processes: int) -> None:
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={processes}", script],
        env=os.environ | environment, check=True, timeout=300,
    )  # fmt: skip


def train_in_processes(name: str, folder: Path, processes: int, micro_batches: int) -> Any:
    """The model's weights after the page's code."""
    code = code_of(name, {
        "AdamW(model.parameters(), lr=1e-5)": "SGD(model.parameters(), lr=0.1)",
        "micro_batches = 2\n": f"micro_batches = {micro_batches}\n",
    })  # fmt: skip
    code += "model = getattr(model, 'module', model)\nif not rank:\n    "
    code += f"torch.save(model.state_dict(), 'weights-{processes}')\n" + THE_END
    script = folder / f"train{processes}.py"
    script.write_text("if __name__ == '__main__':\n" + indent(code, "    "))
    start(script, processes)
    return torch.load(f"weights-{processes}")


class Layer(torch.nn.Module):
    """A model of one's own: one layer of attention, rotated by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(260, 32)
        self.places = torch.nn.Embedding(1024, 32)
        self.project, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 260)

    def forward(self, ids: Any, positions: Any, attend: Any) -> Any:
        found = self.project(self.words(ids) + self.places(positions))[0]
        q, k, v = (part.reshape(len(found), 2, 16) for part in found.chunk(3, dim=-1))
        return self.out(attend(q, k, v).flatten(1))[None]


def test_a_loop_of_ones_own() -> None:
    torch.manual_seed(0)
    model = Layer()
    names = run_page("pytorch.md", model=model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    batch = next(iter(names["loader"]))
    whole = model(batch["input_ids"], batch["position_ids"],
                  lambda *qkv: names["attend"](*qkv, batch))  # fmt: skip
    edges = batch["cu_seqlens_q"].tolist()
    for begin, end in pairwise(edges):
        ids = batch["input_ids"][:, begin:end]
        assert batch["position_ids"][0, begin:end].tolist() == list(range(end - begin))
        only = {"cu_seqlens_q": torch.tensor([0, end - begin]), "max_seqlen_q": end - begin}
        alone = model(ids, batch["position_ids"][:, begin:end],
                      lambda *qkv, only=only: names["attend"](*qkv, only))  # fmt: skip
        torch.testing.assert_close(whole[:, begin:end], alone)


def test_a_loop_of_ones_own_in_processes(folder: Path) -> None:
    """With what its page says of torchrun: gradients are one, and the process group is ended."""
    said = re.search(r"^\* Under `torchrun`:.*?(?=^\*|\Z)", page("pytorch.md"), re.M | re.S)
    assert said
    begin, wrap, sampler, end = re.findall("`([^`]*)`", said[0])[1:]
    pack_as_on("pytorch.md")
    lines = [
        "import torch, torch.distributed as dist", "from typing import Any",
        "from torch.nn.parallel import DistributedDataParallel", getsource(Layer),
        "torch.manual_seed(0)", "model = Layer()", begin, wrap,
        code_of("pytorch.md", {"PackedSampler(dataset, seed=0)": sampler}),
        "torch.save([p.grad for p in model.parameters()], f'slopes-{dist.get_rank()}')",
        end, "assert not dist.is_initialized()", THE_END,
    ]  # fmt: skip
    script = folder / "train.py"
    script.write_text("\n".join(lines))
    start(script, 2)
    slopes = [torch.load(f"slopes-{rank}") for rank in range(2)]
    for one, other in zip(*slopes, strict=True):
        assert one.any()
        assert torch.equal(one, other)


def test_energon() -> None:
    names = run_page("energon.md")
    whole = names["loader"]()
    expected = [row.input_ids.tolist() for row, _ in zip(whole, range(6), strict=False)]
    found = [row.input_ids.tolist() for row, _ in zip(names["rows"], range(5), strict=False)]
    assert [names["row"].input_ids.tolist(), *found] == expected


def test_llamafactory_trains_by_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_llamafactory(monkeypatch)
    config = run_page("llama-factory.md")["yaml"]
    # its checkpointing wants an older transformers
    config |= {"disable_gradient_checkpointing": True, "report_to": "none"}
    workflow = import_module("llamafactory.train.sft.workflow")
    made: list[Any] = []
    kind = workflow.CustomSeq2SeqTrainer
    monkeypatch.setattr(
        workflow, "CustomSeq2SeqTrainer", lambda **how: made.append(kind(**how)) or made[0]
    )
    workflow.run_sft(*import_module("llamafactory.hparams").get_train_args(config))
    (trainer,) = made
    assert trainer.state.global_step == config["max_steps"]
    model = trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(list(documents(batch["input_ids"], batch["labels"], batch["position_ids"]))) >= 4
    with torch.no_grad():
        found = model(**batch, use_cache=False).loss.item()
    assert found == pytest.approx(loss_alone(model, batch), rel=1e-4)


def test_axolotl_packs_by_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schema, its loader, its sampler and its collator; training itself wants a GPU."""
    config = run_page("axolotl.md")["yaml"]
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained("my-model")
    settings, dataset = axolotl_prepared(monkeypatch, tokenizer, **config)
    manifest, length = open_packed("documents-packed-1024").manifest, settings.sequence_len
    assert len(dataset) == manifest["segments"]
    sampler = axolotl_batches(dataset, length, sequential=False, drop_last=False)
    collators = import_module("axolotl.utils.collators")
    collate = collators.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer)
    tokens = trained = 0
    for (row,) in sampler:
        batch = collate([[dataset[number] for number in row]])
        tokens += int((batch["attention_mask"] != 0).sum())
        trained += int((batch["labels"] != -100).sum())
        assert batch["input_ids"].shape[1] <= length
    assert (tokens, trained) == (manifest["tokens"], manifest["trained_tokens"])


def test_megatron_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = bridge_datasets(monkeypatch).GPTSFTPackedDataset
    names = run_page("megatron-bridge.md")
    dataset = kind(
        str(names["specs"].packed_train_data_path), SimpleNamespace(eos_id=-1, bos_id=-1),
        max_seq_length=1024, prompt_template="{input}{answer}", label_key="answer",
        truncation_field="input",
    )  # fmt: skip
    packed = open_packed("documents-packed-1024")
    assert len(dataset) == len(packed)
    masks = (dataset.collate_fn([dataset[row]])["loss_mask"] for row in range(len(packed)))
    assert sum(int(one.sum()) for one in masks) == packed.manifest["trained_tokens"]


def assert_same_documents(found: list[dict[str, Any]], directory: str) -> None:
    """Found are the ids and masks of a tokenized directory, in any order."""
    source = DocumentSource(directory)
    given = [source[number] for number in range(len(source))]
    one, other = (
        sorted(
            tuple(tuple(map(int, row[name])) for name in ("input_ids", "loss_mask")) for row in side
        )
        for side in (found, given)
    )
    assert one == other


def test_skyrl(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Its reader keeps the mask from its first 1 on, as that of the response."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    text = page("skyrl.md")
    if not has_module("skyrl.train.dataset.pretokenized"):
        docs_runner.run(text, python=False)
        pytest.skip("this skyrl does not read tokens")
    dataset = docs_runner.run(text)["dataset"]
    rows = [dataset[number] for number in range(len(dataset))]
    for row in rows:
        assert row["num_actions"] == len(row["loss_mask"])
        prompt = len(row["input_ids"]) - row["num_actions"]
        row["loss_mask"] = [0] * prompt + row["loss_mask"]
    assert_same_documents(rows, "chat-tokens")


def rows_of_torchtitan(loader: Any) -> list[tuple[list[int], list[int], list[int]]]:
    """(input, positions, labels) of each row of its batches."""
    rows: list[Any] = []
    for inputs, labels in loader:
        parts = (inputs["input"], inputs["positions"], labels)
        rows += zip(*(part.reshape(-1, 1024).tolist() for part in parts), strict=True)
    return rows


def rows_for_torchtitan() -> list[tuple[list[int], list[int], list[int]]]:
    source, rows = PackedSource("documents-packed-1024"), []
    for row in (source[number] for number in range(len(source))):
        edges = sorted({*row["cu_seqlens"].tolist(), 1024})
        positions = [place for begin, end in pairwise(edges) for place in range(end - begin)]
        rows.append((row["input_ids"].tolist(), positions, [*row["labels"][1:].tolist(), -100]))
    return sorted(rows)


def test_torchtitan(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Two ranks of 0.3.0 take all rows but what is left of two; a loader goes on where it was."""
    docs_runner.run(page("torchtitan.md"), python=False)
    if not has_module("torchtitan.components.dataloader"):
        pytest.skip("this torchtitan reads with Grain")
    monkeypatch.syspath_prepend(str(folder))
    kind = import_module("torch_rows").PackedLoader

    def loader(rank: int) -> Any:
        config = kind.Config(dataset_path="documents-packed-1024")
        return config.build(
            dp_world_size=2, dp_rank=rank, tokenizer=None, seq_len=1024, local_batch_size=2,
            snapshot_every_n_steps=1,
        )  # fmt: skip

    found = [row for rank in range(2) for row in rows_of_torchtitan(loader(rank))]
    expected = rows_for_torchtitan()
    assert len(found) >= len(expected) - 2
    assert {str(row) for row in found} <= {str(row) for row in expected}
    first, again = loader(1), loader(1)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    again.load_state_dict(first.state_dict())
    assert rows_of_torchtitan(again) == rows_of_torchtitan(batches)


def test_torchtitan_with_grain(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    docs_runner.run(page("torchtitan.md"), python=False)
    if not has_module("torchtitan.components.data"):
        pytest.skip("this torchtitan does not read with Grain")
    monkeypatch.syspath_prepend(str(folder))
    rows = import_module("grain_rows").rows
    kind = import_module("torchtitan.components.data").GrainDataLoader

    def loader() -> Any:
        how = {"dp_world_size": 1, "dp_rank": 0, "max_context_length": 1024, "tokenizer": None}
        return kind.Config(dataset=rows, repeat=False).build(num_tokens_per_batch=1024, **how)

    first, again = loader(), loader()
    assert sorted(rows_of_torchtitan(loader())) == rows_for_torchtitan()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    again.load_state_dict(first.state_dict())
    assert rows_of_torchtitan(again) == rows_of_torchtitan(batches)


def test_olmo_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of whole documents have what is trained on; so have those that are cut."""
    olmo_data(monkeypatch)
    of_page = run_page("olmo-core.md")
    dataset, config = of_page["dataset"], of_page["config"]
    rows = [dataset[number] for number in range(len(dataset))]
    given = DocumentSource("chat-tokens")
    masks = [given[number]["loss_mask"] for number in range(len(given))]
    assert sum(int(row["label_mask"].sum()) for row in rows) == sum(int(one.sum()) for one in masks)
    names = "tokenizer", "paths", "label_mask_paths", "dtype", "sequence_length", "work_dir"
    used = {name: getattr(config, name) for name in names}
    cut = import_module("olmo_core.data").NumpyFSLDatasetConfig(**used).build()
    cut.prepare()
    tokens = np.concatenate([given[number]["input_ids"] for number in range(len(given))])
    ids = np.concatenate([cut[number]["input_ids"].numpy() for number in range(len(cut))])
    kept = np.concatenate([cut[number]["label_mask"].numpy() for number in range(len(cut))])
    assert len(ids) > 1024
    assert ids.tolist() == tokens[: len(ids)].tolist()
    assert kept.tolist() == np.concatenate(masks).astype(bool)[: len(ids)].tolist()


def test_automodel() -> None:
    """The loader that its recipe makes of the configuration."""
    loaders = import_module("nemo_automodel.components.datasets.loader")
    config = run_page("automodel.md")["yaml"]
    dataset, packing = config["dataset"], config["packed_sequence"]
    settings = loaders.DataloaderConfig(
        dataset_config=loaders.make_dataset_config(dataset.pop("_target_"), dataset),
        packing=loaders.make_packing_config(packing.pop("packing_strategy"), packing),
        collate_fn=loaders.make_collate_fn(config["dataloader"]["collate_fn"]),
        batch_size=config["step_scheduler"]["local_batch_size"],
    )
    rows = trained = 0
    for batch in settings.build(dp_rank=0, dp_world_size=1):
        assert batch["qkv_format"] == "thd"
        assert batch["input_ids"].shape[1] == 1024
        lengths = batch["seq_lens_padded"]
        assert lengths.where(lengths > 0, 0).sum(1).tolist() == [1024] * len(lengths)
        rows, trained = rows + len(lengths), trained + int((batch["labels"] != -100).sum())
    manifest = open_packed("chat-packed").manifest
    assert (rows, trained) == (manifest["rows"], manifest["trained_tokens"])


def test_verl() -> None:
    """Its own way to a class, and its collator; the mask is moved as in its loss."""
    loading = import_module("verl.utils.import_utils")
    collator = import_module("verl.utils.dataset.dataset_utils").SFTTensorCollator
    docs_runner.run(page("verl.md"))
    kind = loading.load_extern_object("documents.py", "TokenizedDocuments")
    config = {"max_length": 1024, "truncation": "error"}
    dataset = kind(parquet_files="chat-tokens", tokenizer=None, config=config, processor=None)
    loader = torch.utils.data.DataLoader(dataset, 4, collate_fn=collator("no_padding"))
    given, number = DocumentSource("chat-tokens"), 0
    for batch in loader:
        labels = torch.cat([
            torch.from_numpy(np.where(one["loss_mask"], one["input_ids"], -100))
            for one in (given[number + k] for k in range(batch["input_ids"].size(0)))
        ])  # fmt: skip
        number += batch["input_ids"].size(0)
        targets = batch["input_ids"].values().roll(-1)
        mask = batch["loss_mask"].values().roll(-1)
        assert targets.where(mask > 0, -100).tolist() == labels.roll(-1).tolist()
        assert batch["position_ids"].values().tolist() == [
            place for ids in batch["input_ids"].unbind() for place in range(len(ids))
        ]
    assert number == len(given)
    assert len(kind(["chat-tokens"] * 2, None, config)) == 2 * number
    assert len(kind("chat-tokens", None, config, max_samples=3)) == 3
    few = {"max_length": 100, "truncation": "error"}
    with pytest.raises(ValueError, match="document 0 has"):
        kind("chat-tokens", None, few)[0]
    assert len(kind("chat-tokens", None, few | {"truncation": "right"})[0]["loss_mask"]) == 100


def test_maxtext() -> None:
    """Parquet through Grain as in its configuration, and its arrays by their definition."""
    text = page("maxtext.md")
    run_page("maxtext.md")
    config, arrays = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S))
    grain = import_module("grain")
    (column,), length = config["train_data_columns"], config["max_target_length"]
    files = sorted(str(path) for path in Path().glob(config["grain_train_files"]))
    documents = grain.MapDataset.source(files).map(grain.experimental.ParquetIterDataset)
    documents = grain.experimental.InterleaveIterDataset(documents, cycle_length=1)
    assert config["grain_packing_type"] == "concat_then_split"
    rows = grain.experimental.ConcatThenSplitIterDataset(
        documents.map(lambda row: {"inputs": row[column]}), length_struct={"inputs": length}
    )
    given = DocumentSource("documents-tokens")
    ids = [int(token) for k in range(len(given)) for token in given[k]["input_ids"]]
    found = [row["inputs"][row["inputs_segment_ids"] > 0] for row in rows]
    assert np.concatenate(found).tolist() == ids
    paths = [line.split(",")[1] for line in Path("mix.txt").read_text().splitlines()]
    read = [np.memmap(f"documents-olmo/{path}", np.uint16) for path in paths]
    assert np.concatenate(read).tolist() == ids
    if has_module("maxtext.input_pipeline.olmo_data_grain"):
        read_by_maxtext(arrays["max_target_length"], ids)


def read_by_maxtext(length: int, ids: list[int]) -> None:
    index = import_module("maxtext.input_pipeline.olmo_data").build_index(
        [("documents-olmo/part-00000.npy", "documents")], length, tokenizer="my-model",
        header_reader=lambda path: ("uint16", (Path(path).stat().st_size // 2,)),
    )  # fmt: skip
    source = import_module("maxtext.input_pipeline.olmo_data_grain").OlmoNpyDataSource(index)
    found = np.concatenate([source[number]["tokens"] for number in range(len(source))])
    assert found.tolist() == ids[: len(ids) // length * length]
