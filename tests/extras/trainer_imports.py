"""Trainers whose packages import more than a CPU has, or older versions of others than are here."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import SequentialSampler


def allow_llamafactory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let llamafactory be imported for supervised fine-tuning of text."""
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    other_stages = (f"llamafactory.train.{stage}" for stage in ("dpo", "kto", "ppo", "pt", "rm"))
    for name in ("torchaudio", *other_stages):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("trl.AutoModelForCausalLMWithValueHead", object, raising=False)


def bridge_datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron-Bridge's module of packed data sets, alone: the rest needs transformer_engine."""
    (home,) = {
        path for path in import_module("megatron").__path__ if (Path(path) / "bridge").is_dir()
    }
    tokenizer = "megatron.bridge.training.tokenizers.tokenizer"
    names = ["megatron.bridge", *("megatron.bridge." + part for part in (
        "training", "training.tokenizers", "training.tokenizers.tokenizer"))]  # fmt: skip
    for name in names:
        module = ModuleType(name)
        module.__path__ = [f"{home}/bridge"] if name == "megatron.bridge" else []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules[tokenizer], "MegatronTokenizer", object, raising=False)
    return import_module("megatron.bridge.data.datasets.sft")


def olmo_data(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OLMo-core's modules (utils, numpy_dataset) of data, for local files."""
    client = type("Client", (), {"recoverable_errors": ()})
    for name in ("cached_path", "cached_path.schemes"):
        module = ModuleType(name)
        vars(module).update(
            cached_path=lambda path, **_: Path(path),
            S3Client=client,
            SchemeClient=client,
            add_scheme_client=lambda _: None,
        )
        monkeypatch.setitem(sys.modules, name, module)
    names = ("utils", "numpy_dataset")
    return [import_module(f"olmo_core.data.{name}") for name in names]


def axolotl_prepared(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, **config: Any) -> Any:
    """(settings, data set) that axolotl makes of its configuration."""
    schema = import_module("axolotl.utils.schemas.config").AxolotlInputConfig
    loading = import_module("axolotl.utils.data.sft")
    monkeypatch.setenv("AXOLOTL_IS_PREPROCESS", "1")
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    settings = schema(**config, dataset_num_proc=1).model_dump(exclude_none=True)
    settings = import_module("axolotl.utils.dict").DictDefault(settings)
    return settings, loading.prepare_datasets(settings, tokenizer)[0]


def axolotl_batches(dataset: Any, length: int, **how: Any) -> Any:
    """Its multipack sampler, in the order of the data set."""
    samplers = import_module("axolotl.utils.samplers")
    return samplers.MultipackBatchSampler(
        SequentialSampler(dataset), batch_size=1, batch_max_len=length, group_size=100000,
        bin_size=200, lengths=samplers.get_dataset_lengths(dataset), **how,
    )  # fmt: skip
