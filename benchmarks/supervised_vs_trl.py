"""How much faster is `packer pack` than TRL's way with conversations, and with prompts?

chat_sgd_toolcalls (14 MB) under the qwen3 training template with assistant masks, and
sft_t0_p3_prompts (13 MB) as prompts and completions; qwen3, L = 4096, longer ones cut. TRL's way
is one record at a time in two processes, as SFTTrainer does it. Whole processes, imports
included, alternating; the fastest of each counts. About two minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import inputs
from measuring import report, run, say, skip
from runs import MAX_LENGTH, pack
from settings import BENCHMARKS, Settings, from_environment

RUNS, PEER_RUNS = 5, 2
PROCESSES = 2
TEMPLATE = "trl__qwen3_training.jinja"
QUESTIONS = (
    ("chat with assistant masks, against TRL's way", "chat_sgd_toolcalls", TEMPLATE, 8.0),
    ("prompts and completions, against TRL's way", "sft_t0_p3_prompts", None, 12.0),
)


def _theirs(settings: Settings, file: Path, template: Path | None) -> tuple[float, int]:
    """(seconds, rows) of the peers' run."""
    script = BENCHMARKS / "peers" / "trl_supervised.py"
    with inputs.Output(settings) as output, tempfile.TemporaryDirectory() as home:
        command: list[str | Path] = [settings.peers_python, script, output]
        command += [settings.tokenizers / "qwen3", str(MAX_LENGTH), str(PROCESSES)]
        environment = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        finished = run([*command, template or "none", file], environment=environment)
    return finished.seconds, int(finished.stdout.split()[-2])


def _ours(settings: Settings, file: Path, template: Path | None) -> tuple[float, int]:
    options: tuple[str, ...] = ("--overlong", "truncate", "--workers", str(PROCESSES))
    if template:
        options += ("--chat-template", str(template))
    with inputs.Output(settings) as output:
        tokenizer = settings.tokenizers / "qwen3"
        packed = pack(settings, [file], output, tokenizer=tokenizer, options=options)
    return packed.finished.seconds, packed.figures["rows"]


def main() -> None:
    settings = from_environment()
    for what, name, template_name, least in QUESTIONS:
        target = f">= {least:.0f} x"
        template = settings.chat_templates / template_name if template_name else None
        why = inputs.missing_file(settings, name, template)
        if settings.quick or not settings.peers_python.is_file():
            why = "quick" if settings.quick else "no peers' environment: make peers"
        if why:
            skip(what, target, why)
            continue
        file = inputs.unpacked(settings, name)
        ours, theirs = [], []
        for turn in range(RUNS):
            ours.append(_ours(settings, file, template))
            say(f"packer: {ours[-1][0]:.2f} s")
            if turn < PEER_RUNS:
                theirs.append(_theirs(settings, file, template))
                say(f"peers: {theirs[-1][0]:.2f} s")
        (our_best, our_rows), (their_best, their_rows) = min(ours), min(theirs)
        ratio = their_best / our_best
        report(
            what,
            target,
            f"{ratio:.1f} x ({our_best:.2f} s and {their_best:.1f} s)",
            ratio >= least,
            ratio=ratio,
            seconds=[seconds for seconds, _ in ours],
            their_seconds=[seconds for seconds, _ in theirs],
            input_bytes=file.stat().st_size,
            rows=our_rows,
            their_rows=their_rows,
        )


if __name__ == "__main__":
    main()
