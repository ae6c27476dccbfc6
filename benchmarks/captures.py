"""How fast are captures of agents, merged?

160 MB of JSON lines, twelve calls a session, whose prompts grow to 8,000 tokens and so repeat what
came before: as one record for each session, and as one for each call. The time of whole processes
with two workers, with default options. A minute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import inputs
from measuring import report, run
from settings import CHECKOUT, from_environment

RUNS, LEAST_MB = 3, 100.0


def _cut(sessions: Path, calls: Path) -> None:
    """Write the calls of sessions as records of their own."""
    with sessions.open() as source, calls.open("w") as file:
        for line in source:
            session = json.loads(line)
            for call in session["calls"]:
                record = {"session_id": session["session_id"], **call}
                file.write(json.dumps(record, separators=(",", ":")) + "\n")


def main() -> None:
    settings = from_environment()
    most = 2_000_000 if settings.quick else 160_000_000
    with inputs.Output(settings) as output:
        sessions, calls = (output.with_name(f"{name}.jsonl") for name in ("sessions", "calls"))
        run([sys.executable, CHECKOUT / "tests" / "captures.py", sessions, str(most)])
        _cut(sessions, calls)
        for path, what in ((sessions, "a record a session"), (calls, "a record a call")):
            command = [settings.packer, "pack", path, "--max-length", "8192", "--workers", "2",
                       "--output", output, "--overwrite", "--quiet", "--json"]  # fmt: skip
            runs = [run([*map(str, command)]) for _ in range(1 if settings.quick else RUNS)]
            best, size = min(runs, key=lambda one: one.seconds), path.stat().st_size
            rate = size / best.seconds / 1e6
            report(
                f"pack, {size / 1e6:.0f} MB of captures, {what}",
                "" if settings.quick else f">= {LEAST_MB:.0f} MB/s on two cores",
                f"{rate:.0f} MB/s ({best.seconds:.2f} s, {best.processor_seconds:.2f} s of "
                "processor time)",
                None if settings.quick else rate >= LEAST_MB,
                mb_s=rate,
                share_of_target=rate / LEAST_MB,
                seconds=[one.seconds for one in runs],
                processor_seconds=[one.processor_seconds for one in runs],
            )
            path.unlink()


if __name__ == "__main__":
    main()
