"""The peers' plans of the lengths in a .npy file: {peer: {ns_a_document, rows} or {skipped}}.

Usage: plan.py LENGTHS MAX_LENGTH   (run in the peers' environment)
"""

import json
import sys
import time

import numpy as np
import pyarrow as pa


def trl(lengths, max_length):
    """Its documents must be there: one byte a token, so that moving them costs little."""
    from trl.data_utils import _pack_bfd  # noqa: PLC0415

    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = pa.array(np.zeros(offsets[-1], np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, values)})
    begun = time.perf_counter()
    packed = _pack_bfd(table, max_length, "split")
    return time.perf_counter() - begun, len(packed)


def seqpacker(lengths, max_length):
    from seqpacker import Packer  # noqa: PLC0415 may be absent

    packer = Packer(capacity=max_length, strategy="obfd")
    given = lengths.tolist()
    begun = time.perf_counter()
    result = packer.pack(given)
    return time.perf_counter() - begun, len(result.bins)


lengths, max_length = np.load(sys.argv[1]), int(sys.argv[2])
found = {}
for name, plan in (("TRL _pack_bfd", trl), ("seqpacker", seqpacker)):
    try:
        seconds, rows = min(plan(lengths, max_length) for _ in range(2))
        found[name] = {"ns_a_document": seconds / len(lengths) * 1e9, "rows": rows}
    except ImportError as error:
        found[name] = {"skipped": f"not installed: {error}"}
print(json.dumps(found))
