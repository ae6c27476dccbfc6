"""How fast do packed rows come from a bucket: into an empty cache, and out of a full one?

66 MB of text (2 MB with --quick), packed into rows of 4,096, lie on an S3 server on this machine
(moto's, in a process of its own). A DataLoader in one process reads all of them in batches of 8, in
the sampler's order: through an empty cache, then again, in turn with the local directory. What the
server alone gives is measured with s3fs. In the peers' environment (peers/from_url.py). A minute.
"""

from __future__ import annotations

import json

import inputs
from measuring import report, run, skip
from runs import MAX_LENGTH, pack
from settings import BENCHMARKS, from_environment

WARM = 0.9
COLD_ROW = f"a bucket, rows of {MAX_LENGTH:,} in batches of 8: into an empty cache"
WARM_ROW = f"a bucket, rows of {MAX_LENGTH:,} in batches of 8: from the cache, against a directory"


def main() -> None:
    settings = from_environment()
    target = f">= {WARM} x the rows/s"
    why = inputs.missing(settings)
    if not settings.peers_python.is_file():
        why = "no peers' environment: make peers"
    found = {}
    if not why:
        with inputs.Output(settings) as output:
            pack(settings, inputs.once(settings), output, tokenizer=settings.tokenizer)
            script = BENCHMARKS / "peers" / "from_url.py"
            found = json.loads(run([settings.peers_python, script, output]).stdout)
        why = found.get("skipped", "")
    if why:
        skip(COLD_ROW, "", why)
        skip(WARM_ROW, target, why)
        return
    cold, alone = found["cold"], found["fetched"]
    measured = (
        f"{cold:,.0f} rows/s, {cold * found['row_bytes'] / 1e6:,.0f} MB/s "
        f"(the server alone: {alone:,.0f} rows/s)"
    )
    report(COLD_ROW, "", measured, None, **found)
    warm, local = found["warm"], found["local"]
    measured = f"{warm / local:.2f} x ({warm:,.0f} and {local:,.0f} rows/s)"
    report(WARM_ROW, target, measured, warm >= WARM * local, **found)


if __name__ == "__main__":
    main()
