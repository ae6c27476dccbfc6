"""TRL's way with conversations or prompts: tokenized and masked by datasets.map in two processes,
packed by trl.pack_dataset, saved.

Usage: trl_supervised.py OUTPUT TOKENIZER MAX_LENGTH PROCESSES TEMPLATE|none FILE...
(in the peers' environment). As `SFTTrainer` prepares data: one record at a time, assistant masks by
`apply_chat_template` (assistant_only_loss), a completion by the common prefix (trl 1.16,
trainer/sft_trainer.py), labels from the mask, longer records cut off.
"""

import sys
from pathlib import Path

import datasets
from transformers import AutoTokenizer
from trl import pack_dataset

output, tokenizer_path, max_length, processes, template, *files = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
if template != "none":
    tokenizer.chat_template = Path(template).read_text()
eos = tokenizer.eos_token


def chat(record):
    found = tokenizer.apply_chat_template(
        record["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    return labelled(found["input_ids"], found["assistant_masks"])


def completion(record):
    prompt, answer = record[PROMPT], record[COMPLETION]
    answer = answer if answer.endswith(eos) else answer + eos
    before = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + answer)["input_ids"]
    shared = next(
        (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before)
    )
    return labelled(ids, [0] * shared + [1] * (len(ids) - shared))


def labelled(ids, mask):
    labels = [token if flag else -100 for token, flag in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}


data = datasets.load_dataset("json", data_files=files, split="train")
PROMPT, COMPLETION = (
    ("question", "answer") if "question" in data.column_names else ("prompt", "completion")
)
work = chat if "messages" in data.column_names else completion
data = data.map(work, remove_columns=data.column_names, num_proc=int(processes))
packed = pack_dataset(data, seq_length=int(max_length), strategy="bfd")
packed.save_to_disk(output)
print(f"{len(packed)} rows")
