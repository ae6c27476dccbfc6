"""The field's usual way: datasets + tokenizers + trl.pack_dataset("bfd_split"), saved.

Usage: trl_pack.py OUTPUT TOKENIZER MAX_LENGTH FILE...   (run in the peers' environment)
"""

import sys

import datasets
from transformers import AutoTokenizer
from trl import pack_dataset

output, tokenizer_path, max_length, *files = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
eos = [tokenizer.eos_token_id]


def tokenize(batch):
    return {"input_ids": [ids + eos for ids in tokenizer(batch["text"])["input_ids"]]}


data = datasets.load_dataset("json", data_files=files, split="train")
data = data.map(tokenize, batched=True, remove_columns=data.column_names)
packed = pack_dataset(data, seq_length=int(max_length), strategy="bfd_split")
packed.save_to_disk(output)
print(f"{len(packed)} rows")
