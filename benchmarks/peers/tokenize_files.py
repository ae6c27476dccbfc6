"""Tokenize JSON lines the way Megatron-LM's tools/preprocess_data_fast.py does.

    tokenize_files.py PREFIX TOKENIZER FILE...     writes PREFIX.bin and PREFIX.idx

gigatoken reads and encodes all files at once (`encode_files`), the end-of-document token is put
after every document, and the flat array is written in one piece: everything in memory.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import awkward as ak
import gigatoken
import numpy as np


def main(prefix: str, tokenizer: str, *files: str) -> None:
    content = (Path(tokenizer) / "tokenizer.json").read_bytes()
    engine = gigatoken.Tokenizer.from_json(content)
    documents = engine.encode_files(gigatoken.JsonlFileSource(list(files), field="text"))
    lengths = np.asarray(ak.num(documents), np.int64)
    flat = np.asarray(ak.flatten(documents))
    named = {one["content"]: one["id"] for one in json.loads(content)["added_tokens"]}
    ends = np.cumsum(lengths)
    flat = np.insert(flat, ends, named["<|end_of_text|>"]).astype(np.int32)
    lengths += 1
    flat.tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 4))
        index.write(struct.pack("<QQ", len(lengths), len(lengths) + 1))
        lengths.astype(np.int32).tofile(index)
        pointers = np.concatenate([[0], np.cumsum(lengths[:-1])]) * 4
        pointers.astype(np.int64).tofile(index)
        np.arange(len(lengths) + 1, dtype=np.int64).tofile(index)
    print(len(lengths), len(flat))


if __name__ == "__main__":
    main(*sys.argv[1:])
