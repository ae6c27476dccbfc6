"""How much faster is `packer pack` than TRL's way with conversations, and with prompts?

chat_sgd_toolcalls (14 MB) under the qwen3 training template with assistant masks, and
sft_t0_p3_prompts (13 MB) as prompts and completions; the conversations twelve times over, with a
new word in every message (174 MB), under the templates of qwen3 and llama3. L = 4096, longer ones
cut. TRL's way is one record at a time in two processes, as SFTTrainer does it. Whole processes,
imports included, alternating; the fastest of each counts. The large ones are also packed with one
worker. About ten minutes, most of them the peers'.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import inputs
from measuring import report, run, say, skip
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
    least: float
    times: int = 1
    runs: int = 5
    peer_runs: int = 2


_CHAT, _LARGE = "chat_sgd_toolcalls", {"times": TIMES, "runs": 2, "peer_runs": 1}
QUESTIONS = (
    _Question("chat with assistant masks, against TRL's way", _CHAT, "qwen3",
              "trl__qwen3_training.jinja", 9.0),
    _Question("prompts and completions, against TRL's way", "sft_t0_p3_prompts", "qwen3",
              None, 12.0),
    _Question("174 MB of conversations (qwen3), against TRL's way", _CHAT, "qwen3",
              "trl__qwen3_training.jinja", 12.0, **_LARGE),
    _Question("174 MB of conversations (llama3), against TRL's way", _CHAT, "llama3_1",
              "trl__llama3_training.jinja", 12.0, **_LARGE),
)  # fmt: skip
LEAST_OF_TWO = 1.7


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
) -> tuple[float, int]:
    options: tuple[str, ...] = ("--overlong", "truncate", "--workers", str(workers))
    if template := _template(settings, asked):
        options += ("--chat-template", str(template))
    with inputs.Output(settings) as output:
        tokenizer = settings.tokenizers / asked.tokenizer
        packed = pack(settings, [file], output, tokenizer=tokenizer, options=options)
    return packed.finished.seconds, packed.figures["rows"]


def _compare(settings: Settings, asked: _Question, file: Path, peers: int) -> None:
    ours, theirs, alone = [], [], []
    for turn in range(asked.runs):
        ours.append(_ours(settings, asked, file))
        say(f"packer: {ours[-1][0]:.2f} s")
        if asked.times > 1:
            alone.append(_ours(settings, asked, file, workers=1))
            say(f"packer, one worker: {alone[-1][0]:.2f} s")
        if turn < peers:
            theirs.append(_theirs(settings, asked, file))
            say(f"peers: {theirs[-1][0]:.2f} s")
    our_best, our_rows = min(ours)
    seconds = [seconds for seconds, _ in ours]
    if theirs:
        their_best, their_rows = min(theirs)
        ratio = their_best / our_best
        report(
            asked.what,
            f">= {asked.least:.0f} x",
            f"{ratio:.1f} x ({our_best:.2f} s and {their_best:.1f} s)",
            ratio >= asked.least,
            ratio=ratio,
            seconds=seconds,
            their_seconds=[seconds for seconds, _ in theirs],
            input_bytes=file.stat().st_size,
            rows=our_rows,
            their_rows=their_rows,
        )
    if alone:
        ratio = min(alone)[0] / our_best
        report(
            f"{asked.what.partition(',')[0]}, two workers against one",
            f">= {LEAST_OF_TWO} x",
            f"{ratio:.2f} x ({our_best:.2f} s and {min(alone)[0]:.2f} s)",
            ratio >= LEAST_OF_TWO,
            ratio=ratio,
            seconds=seconds,
            alone_seconds=[seconds for seconds, _ in alone],
            input_bytes=file.stat().st_size,
        )


def main() -> None:
    settings = from_environment()
    for asked in QUESTIONS:
        target = f">= {asked.least:.0f} x"
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
