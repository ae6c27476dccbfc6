"""Run the benchmarks, each question in a fresh process; print the table and write the JSON.

    python benchmarks/run.py              everything, 25 minutes -> results/latest.json
    python benchmarks/run.py --quick      small sizes, no peers, under a minute; only printed
    python benchmarks/run.py --only plan_speed --only startup

Exit status 0 even when a target is missed, because machines are noisy; 1 when a benchmark
itself fails. What could not be measured is shown as skipped, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import settings

QUESTIONS = (
    "plan_speed", "plan_lengths", "mixed_rows", "plan_vs_peers", "fill_speed", "pack_vs_trl",
    "supervised_vs_trl", "pack_large", "tokenize_speed", "from_tokens", "export_speed", "carried",
    "captures", "filters", "recipe", "scaling", "every_core", "memory", "again", "verify_speed",
    "audit", "many_files", "rows_bound", "loader", "even_steps", "even_steps_gpu", "startup",
    "from_clone", "checks_cost",
)  # fmt: skip
LATEST = settings.BENCHMARKS / "results" / "latest.json"
_LIBRARIES = ("llm-packer", "numpy", "pyarrow", "msgspec", "tokenizers", "gigatoken")
_PEERS = ("trl", "transformers", "datasets", "tokenizers", "torch", "seqpacker")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, no peers")
    parser.add_argument("--only", action="append", choices=QUESTIONS, metavar="NAME")
    for name in ("data", "tokenizers", "cache", "peers_python"):
        variable, default = settings.variable(name), getattr(settings.Settings, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=Path,
            default=os.environ.get(variable) or default,
            metavar="PATH",
            help=f"also {variable}",
        )
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON")
    return parser.parse_args()


def _environment(options: argparse.Namespace) -> dict[str, str]:
    names = ("data", "tokenizers", "cache", "peers_python")
    found = {settings.variable(n): os.path.abspath(getattr(options, n)) for n in names}
    return {**os.environ, **found, settings.variable("quick"): "1" if options.quick else "0"}


def ask(question: str, environment: dict[str, str]) -> dict[str, Any]:
    """One question in a process of its own: its rows, its time, its peak memory."""
    begun = time.perf_counter()
    script = settings.BENCHMARKS / f"{question}.py"
    child = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    )
    lines = child.stdout.read().splitlines() if child.stdout else []
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "question": question,
        "failed": child.returncode != 0,
        "seconds": round(time.perf_counter() - begun, 1),
        "peak_memory_mb": usage.ru_maxrss // 1000,
        "rows": [_rounded(json.loads(line)) for line in lines],
    }


def _rounded(value: Any) -> Any:
    """Four digits are more than the noise leaves."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _machine(peers_python: Path) -> dict[str, Any]:
    """What the figures depend on; nothing that names this machine or its folders."""
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9),
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "peers": _peer_versions(peers_python),
    }


def _peer_versions(python: Path) -> dict[str, str]:
    if not python.is_file():
        return {}
    code = (
        "import json, sys; from importlib import metadata as m\n"
        "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have}))"
    )
    out = subprocess.run([python, "-c", code, *_PEERS], capture_output=True, check=True)
    return dict(json.loads(out.stdout))


def _result(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    return {True: "ok", False: "MISSED", None: ""}[row["reached"]]


def print_table(answers: list[dict[str, Any]]) -> None:
    """what | must reach | measured | result"""
    table = [("what", "must reach", "measured", "result")]
    for answer in answers:
        table += [(r["what"], r["target"], r["measured"], _result(r)) for r in answer["rows"]]
        if answer["failed"]:
            table.append((answer["question"], "", "", "FAILED: see above"))
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(" | ".join([*cells, row[3]]).rstrip())
        if row is table[0]:
            print("-+-".join("-" * width for width in (*widths, 6)))


def main() -> int:
    options = _options()
    environment = _environment(options)
    load = round(os.getloadavg()[0], 2)
    answers = []
    for question in options.only or QUESTIONS:
        print(f"{question} ...", file=sys.stderr, flush=True)
        answers.append(ask(question, environment))
    print_table(answers)
    full = not (options.quick or options.only)
    if target := options.output or (LATEST if full else None):
        found = {
            "machine": _machine(Path(environment[settings.variable("peers_python")])),
            "quick": options.quick,
            "load_average_before": load,
            "answers": answers,
        }
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return int(any(answer["failed"] for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
