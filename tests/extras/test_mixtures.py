"""What docs/migration.md says of mixtures in other packages."""

from __future__ import annotations

import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trainer_imports import allow_llamafactory

SIZES = {"web": 600, "code": 300, "chat": 50}

# those of the trainers, about themselves and each other
pytestmark = [pytest.mark.usefixtures("folder"), pytest.mark.filterwarnings("ignore")]


def write_texts() -> None:
    for name, count in SIZES.items():
        lines = [{"text": f"{name} {number} " + "word " * (number % 9)} for number in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def axolotl_rows() -> list[Any]:
    """Every dataset as axolotl loads it: chat is named twice."""
    shared = import_module("axolotl.utils.data.shared")
    default = import_module("axolotl.utils.dict").DictDefault
    each = [default({"path": f"{name}.jsonl", "ds_type": "json", "split": "train"})
            for name in (*SIZES, "chat")]  # fmt: skip
    return [shared.load_dataset_with_config(one, False, streaming=False)
            for one in shared.datasets_with_name_generator(each)]  # fmt: skip


def test_axolotl() -> None:
    write_texts()
    shared = pytest.importorskip("axolotl.utils.data.shared")
    default = import_module("axolotl.utils.dict").DictDefault
    rows = shared.merge_datasets(axolotl_rows(), default(seed=1, shuffle_merged_datasets=True))
    names = Counter(text.split()[0] for text in rows["text"])
    assert names == {"web": 600, "code": 300, "chat": 100}  # as they are: no shares
    apart = shared.create_train_validation_split(rows, default(seed=1), 0.5)
    assert set(apart[0]["text"]) & set(apart[1]["text"])
    apart = shared.create_train_validation_split(
        rows, default(seed=1, dataset_exact_deduplication=True), 0.5
    )
    assert not set(apart[0]["text"]) & set(apart[1]["text"])
    assert sum(map(len, apart)) == 950  # what was named twice is there once


PROBABILITIES = {"interleave_probs": "0.6,0.3,0.1"}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"mix_strategy": "concat"}, {"web": 600, "code": 300, "chat": 100}),
        ({"mix_strategy": "concat", "max_samples": 40}, {"web": 40, "code": 40, "chat": 40}),
        ({"mix_strategy": "interleave_under", **PROBABILITIES}, None),
        ({"mix_strategy": "interleave_over", **PROBABILITIES}, None),
    ],
)
def test_llamafactory(
    how: dict[str, Any], expected: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_llamafactory(monkeypatch)
    pytest.importorskip("llamafactory")
    write_texts()
    columns = {"columns": {"prompt": "text"}}
    info = {name: {"file_name": f"{name}.jsonl", **columns} for name in SIZES}
    info["chat"]["num_samples"] = 2 * SIZES["chat"]
    Path("dataset_info.json").write_text(json.dumps(info))
    data = import_module("llamafactory.data.loader")
    options = import_module("llamafactory.hparams.data_args").DataArguments(
        dataset=",".join(SIZES), dataset_dir=".", template="default", overwrite_cache=True, **how
    )
    model = SimpleNamespace(cache_dir=None, hf_hub_token=None, ms_hub_token=None,
                            om_hub_token=None, trust_remote_code=False)  # fmt: skip
    training = SimpleNamespace(seed=1, local_process_index=0)
    rows = data._get_merged_dataset(options.dataset, model, options, training, "pt")
    names = Counter(one[0]["content"].split()[0] for one in rows["_prompt"])
    if expected is not None:
        assert names == expected
        return
    under = how["mix_strategy"] == "interleave_under"
    used_up = [
        name for name, count in names.items() if count >= info[name].get("num_samples", SIZES[name])
    ]
    assert used_up if not under else len(used_up) == 1
    assert (len(used_up) == len(SIZES)) != under
    shares = [names[name] / len(rows) for name in SIZES]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.05)  # drawn at random
    assert shares != pytest.approx([0.6, 0.3, 0.1], abs=0.0001)


def test_megatron() -> None:
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    indexed = import_module("megatron.core.datasets.indexed_dataset")
    gpt = import_module("megatron.core.datasets.gpt_dataset")
    blend = import_module("megatron.core.datasets.utils").get_blend_from_list
    for number, (name, count) in enumerate(SIZES.items()):
        file = indexed.IndexedDatasetBuilder(f"{name}.bin", dtype=np.int32)
        for _ in range(count):
            file.add_document(torch.full((100,), number + 1, dtype=torch.int32), [100])
        file.finalize(f"{name}.idx")
    tokenizer = SimpleNamespace(eod=0, pad=0, vocab_size=10, unique_identifiers={"class": "none"})
    config = gpt.GPTDatasetConfig(
        random_seed=1, sequence_length=100, split="90,10,0", tokenizer=tokenizer,
        blend=blend(["0.6", "web", "0.3", "code", "0.1", "chat"]), path_to_cache="cache",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{Path('group').absolute()}", rank=0, world_size=1
    )
    try:
        train, validation, _ = builder.BlendedMegatronDatasetBuilder(
            gpt.GPTDataset, [1000, 50, 0], lambda: True, config
        ).build()
    finally:
        torch.distributed.destroy_process_group()
    found = Counter(train.dataset_index.tolist())
    shares = [found[number] / len(train) for number in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.002)
    assert found[2] > 2 * 0.9 * SIZES["chat"]  # more than two epochs of it, unasked
    assert len(validation) >= 50


def test_olmo_core() -> None:
    mixture = pytest.importorskip("olmo_core.data.source_mixture")
    for name, count in SIZES.items():
        np.zeros(1000 * count, np.uint32).tofile(f"{name}.npy")

    def tokens(share: float, repetitions: float) -> dict[str, int]:
        ratios = {"web": 0.8 - share, "code": 0.2, "chat": share}
        sources = [
            mixture.SourceMixtureConfig(
                name, ratio, [f"{name}.npy"],
                max_repetition_ratio=repetitions if name == "chat" else 1.0,
            )
            for name, ratio in ratios.items()
        ]  # fmt: skip
        config = mixture.SourceMixtureDatasetConfig(
            mixture.SourceMixtureList(sources), 500_000, 8192, render_tables=False
        )
        built = config.build(npdtype=np.uint32, sequence_length=512)
        return {one.name: sum(path.tokens for path in one.path_tokens) for one in built.sources}

    assert all(count % 512 == 0 for count in tokens(0.2, 2.0).values())
    with pytest.raises(Exception, match="Insufficient tokens for source: chat"):
        tokens(0.2, 1.0)
