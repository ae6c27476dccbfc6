"""Makes documents.jsonl: 400 small documents of very different lengths, always the same bytes."""

import json
import random
from pathlib import Path

SUBJECTS = "the packer|a short text|the longest row|every segment|one shard|a tired engineer"
VERBS = "fills|finds|counts|keeps|meets|carries|maps|waits for"
OBJECTS = "the last gap|a row of its own|its neighbours|the manifest|four thousand tokens|no loss"
ENDS = "before the run ends|without a copy|in one pass|and nothing is lost|at two in the morning|"


def sentence(random_: random.Random) -> str:
    parts = [random_.choice(part.split("|")) for part in (SUBJECTS, VERBS, OBJECTS, ENDS)]
    return " ".join(part for part in parts if part).capitalize() + "."


def main() -> None:
    random_ = random.Random(4096)  # noqa: S311
    lines = []
    for number in range(400):
        sentences = max(1, round(random_.lognormvariate(1.8, 1.0)))
        text = " ".join(sentence(random_) for _ in range(sentences))
        lines.append(json.dumps({"text": text, "number": number}) + "\n")
    Path(__file__).with_name("documents.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
