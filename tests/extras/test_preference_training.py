"""Pairs from the command line to the loss: docs/trainers/preference.md as written, and the rows of
`packer pack --shape preference` against the records one by one.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import docs_runner
import pytest
import tiny_tokenizers as tiny
import torch
from datasets import Dataset
from recipes import run
from tiny_models import save_my_model, tiny_llama
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from trl import DPOTrainer, SFTConfig, SFTTrainer

from packer_cli.errors import DataError, UsageError
from packer_cli.torch import (
    PackedDataset,
    PackedSampler,
    PackedTrainerMixin,
    answer_logps,
    check_isolation,
    preference_collate,
    unpaired_collate,
    varlen_collate,
)

# those of the trainers, about themselves and each other
pytestmark = pytest.mark.filterwarnings("ignore", "error:::packer_cli")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
RECORDS = [
    {
        "prompt": " ".join(WORDS[: 1 + number % 5]),
        "chosen": " " + " ".join(WORDS[number % 4 : 1 + number % 4 + number % 5]),
        "rejected": " " + " ".join(WORDS[8 : 7 - number % 6 : -1]),
    }
    for number in range(14)
]
LABELLED = [
    {"prompt": one["prompt"], "completion": one["chosen"], "label": number % 3 > 0}
    for number, one in enumerate(RECORDS)
]


@pytest.fixture(autouse=True)
def _reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory of a reader of the page: records, and a model called my-model."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_my_model(folder, pad_token_id=1)
    for name, records in (("preferences", RECORDS), ("labelled", LABELLED)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))


def tiny_model() -> Any:
    return tiny_llama(pad_token_id=1)


def packed(name: str, *how: object, output: str = "out", length: int = 128) -> PackedDataset:
    run("pack", name, "-l", length, "-o", output, *how)
    return PackedDataset(output)


def test_the_page_runs_as_written() -> None:
    names = docs_runner.run(docs_runner.page("docs/trainers/preference.md"))
    check_isolation(names["model"], names["batch"]["inputs"])
    check_isolation(names["model"], names["batch"]["mismatched"]["inputs"])


def one_by_one(model: Any, prompt: str, answer: str) -> float:
    """The log-probability of an answer and the end of its text, of its record alone."""
    encode = Tokenizer.from_file("my-model/tokenizer.json").encode
    before, after = (encode(part, add_special_tokens=False).ids for part in (prompt, answer))
    ids = torch.tensor([*before, *after, tiny.EOS_ID])
    logps = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    places = torch.arange(len(before), len(ids))
    return float(logps[places - 1, ids[places]].sum())


FORMS = {
    "plain": [], "multiple": ["--segment-multiple", 8], "shifted": ["--label-shift", "pre"],
    "positions": ["--columns", "input_ids,labels,cu_seqlens,position_ids"],
}  # fmt: skip


@pytest.mark.parametrize("form", [*FORMS, "view", "joined"])
def test_pairs_are_their_records_one_by_one(form: str) -> None:
    if form == "view":
        how = ("--shape", "preference", "--tokenizer", "my-model")
        run("tokenize", "preferences.jsonl", *how, "-o", "tokens")
        dataset = packed("tokens", "--view")
    else:
        how = ("--shape", "preference", "--tokenizer", "my-model", *FORMS.get(form, []))
        dataset = packed("preferences.jsonl", *how)
    if form == "joined":
        dataset = PackedDataset(["out", "out"], columns=["input_ids", "labels", "cu_seqlens"])
    assert {"pair", "side"} <= {*dataset.columns}
    model = tiny_model().eval()
    collate = partial(preference_collate, config=model.config)
    sampler = PackedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler, collate_fn=collate)
    found = []
    with torch.no_grad():
        for batch in loader:
            logps = answer_logps(model(**batch["inputs"]).logits, batch)
            sides = (logps[batch["chosen"]].tolist(), logps[batch["rejected"]].tolist())
            found += zip(*sides, strict=True)
        expected = [
            tuple(one_by_one(model, one["prompt"], one[side]) for side in ("chosen", "rejected"))
            for one in RECORDS * (2 if form == "joined" else 1)
        ]
    torch.testing.assert_close(
        torch.tensor(sorted(found)), torch.tensor(sorted(expected)), atol=1e-4, rtol=1e-6
    )


def test_labelled_answers_are_their_records_one_by_one() -> None:
    dataset = packed("labelled.jsonl", "--shape", "preference", "--tokenizer", "my-model")
    model = tiny_model().eval()
    batch = unpaired_collate(dataset.__getitems__(range(len(dataset))), config=model.config)
    with torch.no_grad():
        logps = answer_logps(model(**batch["inputs"]).logits, batch)
        expected = [(one_by_one(model, one["prompt"], one["completion"]), float(one["label"]))
                    for one in LABELLED]  # fmt: skip
    found = zip(logps.tolist(), batch["desirable"].float().tolist(), strict=True)
    torch.testing.assert_close(
        torch.tensor(sorted(found)), torch.tensor(sorted(expected)), atol=1e-4, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("prompt-completion", r"has a column pair, .* has none"),
        ("preference", "the records are is pairs in the first and answers with"),
    ],
)
def test_pairs_and_other_rows_do_not_join(shape: str, message: str) -> None:
    packed("preferences.jsonl", "--shape", "preference", "--tokenizer", "my-model")
    packed("labelled.jsonl", "--shape", shape, "--tokenizer", "my-model", output="other")
    with pytest.raises(DataError, match=message):
        PackedDataset(["out", "other"], columns=["input_ids", "labels", "cu_seqlens"])


class PlainTrainer(PackedTrainerMixin, Trainer):
    pass


class PlainSFTTrainer(PackedTrainerMixin, SFTTrainer):
    pass


class PackedDPOTrainer(PackedTrainerMixin, DPOTrainer):
    pass


def test_no_plain_training_takes_pairs() -> None:
    """Whatever columns are asked for; the mixin says so before a step."""
    how = ("--shape", "preference", "--tokenizer", "my-model")
    dataset = packed("preferences.jsonl", *how)
    few = PackedDataset("out", columns=["input_ids", "labels", "cu_seqlens"])
    for one in (dataset, few):
        with pytest.raises(UsageError, match=r"rows of pairs.*rejected answers"):
            varlen_collate(one.__getitems__([0]), config=None)
    arguments = {"output_dir": "trained", "use_cpu": True, "report_to": "none"}
    with pytest.raises(UsageError, match="PlainTrainer: train_dataset has rows of pairs") as caught:
        PlainTrainer(tiny_model(), TrainingArguments(**arguments), train_dataset=dataset)
    assert "preference_collate" in caught.value.tip
    with pytest.raises(UsageError, match="PlainSFTTrainer: train_dataset has rows of pairs"):
        PlainSFTTrainer(tiny_model(), SFTConfig(**arguments, bf16=False), train_dataset=dataset)
    for rows in (dataset, Dataset.from_list(RECORDS)):
        with pytest.raises(UsageError, match="DPOTrainer makes losses of padded batches"):
            PackedDPOTrainer(tiny_model(), train_dataset=rows)
