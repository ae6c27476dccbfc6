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
from trainer_imports import allow_llamafactory, axolotl_batches, axolotl_prepared, bridge_datasets
from transformers import LlamaForCausalLM

from packer_cli import open_packed

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
