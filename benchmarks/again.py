"""What does it cost to be killed and run again, and to find that there is nothing new?

670 MB of text, llama3_1, L = 4096, killed with SIGKILL when half of the units are packed. The
time of both runs is compared with that of one undisturbed run. A minute.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import time
from pathlib import Path

import inputs
from measuring import report, run, say, skip
from settings import Settings, from_environment

MOST_RESUME, MOST_UPDATE = 1.25, 1.0
RUNS = 3


def _command(settings: Settings, files: list[Path], output: Path) -> list[str | Path]:
    command: list[str | Path] = [settings.packer, "pack", *files, "--max-length", "4096"]
    return [*command, "--tokenizer", settings.tokenizer, "--output", output, "--quiet", "--json"]


def _killed_halfway(command: list[str | Path], output: Path, units: int) -> float:
    """Seconds until it was killed."""
    begun = time.perf_counter()
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL) as child:
        while child.poll() is None:
            if len(list(output.glob(".packer/*/unit-*.json"))) >= units // 2:
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
    return time.perf_counter() - begun


def main() -> None:
    settings = from_environment()
    size = "20" if settings.quick else "670"
    what = f"killed halfway and run again, {size} MB of text"
    target = f"<= {MOST_RESUME} x one undisturbed run"
    if why := inputs.missing(settings):
        skip(what, target, why)
        return
    files, found = inputs.tenfold(settings), []
    for _ in range(1 if settings.quick else RUNS):
        with inputs.Output(settings) as output:
            whole = run(_command(settings, files, output)).seconds
            units = (output / "units.jsonl").read_bytes().count(b"\n")
        with inputs.Output(settings) as output:
            command = _command(settings, files, output)
            first = _killed_halfway(command, output, units)
            again = run(command, settle=False).seconds
            say(f"undisturbed: {whole:.2f} s; killed after {first:.2f} s, then {again:.2f} s")
            found.append((whole, first, again))
            updates = [run([*command, "--add"], settle=False).seconds for _ in range(5)]
    cost = statistics.median((first + again) / whole for whole, first, again in found)
    measured = f"{cost:.2f} x (median of {len(found)}, {units} units)"
    report(what, target, measured, None if settings.quick else cost <= MOST_RESUME, runs=found)
    report(
        "--add when nothing is new",
        f"< {MOST_UPDATE} s",
        f"{min(updates):.2f} s",
        min(updates) < MOST_UPDATE,
        seconds=updates,
    )


if __name__ == "__main__":
    main()
