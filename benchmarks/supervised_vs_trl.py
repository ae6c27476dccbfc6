"""How much faster is `packer pack` than TRL's way with conversations, and with prompts?

chat_sgd_toolcalls (14 MB) under the qwen3 training template with assistant masks, and GSM8K
(sft_gsm8k_train, 4 MB) as prompts and completions; the conversations twelve times over, with a new
word in every message (174 MB), under the templates of qwen3 and llama3, and GSM8K five times over.
L = 4096, longer ones cut. TRL's way is one record at a time in two processes, as SFTTrainer does
it. Whole processes, imports included, alternating; the fastest of each counts. The large
conversations are also packed with one worker and with four: a worker renders in a process of its
own, so one takes two cores. About ten minutes, most of them the peers'.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import inputs
from measuring import Finished, report, run, say, skip
from runs import MAX_LENGTH, pack
from settings import BENCHMARKS, Settings, from_environment

PROCESSES = 2
TIMES = 12


class _Question(NamedTuple):
    """`times`: how often the input is repeated; `runs`, `peer_runs`: how often it is packed."""

    what: str
    name: str
    tokenizer: str
    template: str | None
    least: float | None
    times: int = 1
    runs: int = 5
    peer_runs: int = 2


_CHAT, _LARGE = "chat_sgd_toolcalls", {"times": TIMES, "runs": 2, "peer_runs": 1}
_PROMPTS = "sft_gsm8k_train"  # 4 MB, of which most of the time is the start
QUESTIONS = (
    _Question("chat with assistant masks, against TRL's way", _CHAT, "qwen3",
              "trl__qwen3_training.jinja", 9.0),
    _Question("4 MB of prompts and completions, against TRL's way", _PROMPTS, "qwen3", None, None),
    _Question("21 MB of prompts and completions, against TRL's way", _PROMPTS, "qwen3",
              None, 12.0, times=5, peer_runs=1),
    _Question("174 MB of conversations (qwen3), against TRL's way", _CHAT, "qwen3",
              "trl__qwen3_training.jinja", 12.0, **_LARGE),
    _Question("174 MB of conversations (llama3), against TRL's way", _CHAT, "llama3_1",
              "trl__llama3_training.jinja", 12.0, **_LARGE),
)  # fmt: skip
WORKERS = (1, 4)  # beside the two of all questions


def _template(settings: Settings, asked: _Question) -> Path | None:
    return settings.chat_templates / asked.template if asked.template else None


def _theirs(settings: Settings, asked: _Question, file: Path) -> tuple[float, int]:
    """(seconds, rows) of the peers' run."""
    script = BENCHMARKS / "peers" / "trl_supervised.py"
    with inputs.Output(settings) as output, tempfile.TemporaryDirectory() as home:
        command: list[str | Path] = [settings.peers_python, script, output]
        command += [settings.tokenizers / asked.tokenizer, str(MAX_LENGTH), str(PROCESSES)]
        environment = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        template = _template(settings, asked) or "none"
        finished = run([*command, template, file], environment=environment)
    return finished.seconds, int(finished.stdout.split()[-2])


def _ours(
    settings: Settings, asked: _Question, file: Path, workers: int = PROCESSES
) -> tuple[Finished, int]:
    """The run, and its rows."""
    options: tuple[str, ...] = ("--overlong", "truncate", "--workers", str(workers))
    if template := _template(settings, asked):
        options += ("--chat-template", str(template))
    with inputs.Output(settings) as output:
        tokenizer = settings.tokenizers / asked.tokenizer
        packed = pack(settings, [file], output, tokenizer=tokenizer, options=options)
    say(f"packer, {workers} workers: {packed.finished.seconds:.2f} s")
    return packed.finished, packed.figures["rows"]


def _compare(settings: Settings, asked: _Question, file: Path, peers: int) -> None:
    ours, theirs = list[tuple[Finished, int]](), list[tuple[float, int]]()
    for turn in range(asked.runs):
        ours.append(_ours(settings, asked, file))
        if turn < peers:
            theirs.append(_theirs(settings, asked, file))
            say(f"peers: {theirs[-1][0]:.2f} s")
    seconds = [one.seconds for one, _ in ours]
    if theirs:
        their_best, their_rows = min(theirs)
        ratio = their_best / min(seconds)
        report(
            asked.what,
            _target(asked),
            f"{ratio:.1f} x ({min(seconds):.2f} s and {their_best:.1f} s)",
            None if asked.least is None else ratio >= asked.least,
            ratio=ratio,
            seconds=seconds,
            their_seconds=[seconds for seconds, _ in theirs],
            input_bytes=file.stat().st_size,
            rows=ours[0][1],
            their_rows=their_rows,
        )
    if asked.times == TIMES:
        _report_workers(settings, asked, file, [one for one, _ in ours])


def _report_workers(
    settings: Settings, asked: _Question, file: Path, of_two: list[Finished]
) -> None:
    """What the conversations take of processors, and how long, by workers."""
    runs = {PROCESSES: of_two}
    for workers in WORKERS:
        runs[workers] = [_ours(settings, asked, file, workers)[0] for _ in range(asked.runs)]
    megabytes = file.stat().st_size / 1e6
    processor = min(one.processor_seconds for one in of_two) / megabytes
    walls = {workers: min(one.seconds for one in runs[workers]) for workers in sorted(runs)}
    told = ", ".join(f"{seconds:.2f}" for seconds in walls.values())
    report(
        f"{asked.what.partition(',')[0]}, by workers",
        "",
        f"{processor * 1000:.0f} ms of processor time a MB; {told} s with "
        f"{', '.join(map(str, walls))} workers",
        None,
        processor_seconds_per_mb=processor,
        seconds=walls,
    )


def _target(asked: _Question) -> str:
    return "" if asked.least is None else f">= {asked.least:.0f} x"


def main() -> None:
    settings = from_environment()
    for asked in QUESTIONS:
        target = _target(asked)
        why = inputs.missing_file(settings, asked.name, _template(settings, asked))
        no_peers = not settings.peers_python.is_file()
        if settings.quick or why:
            skip(asked.what, target, why or "quick")
            continue
        if no_peers:
            skip(asked.what, target, "no peers' environment: make peers")
            if asked.times == 1:
                continue
        file = inputs.unpacked(settings, asked.name)
        if asked.times > 1:
            file = inputs.repeated(settings, asked.name, asked.times)
        _compare(settings, asked, file, 0 if no_peers else asked.peer_runs)


if __name__ == "__main__":
    main()
