"""Makes documents.jsonl, 400 small documents of very different lengths, and chat.jsonl, 40
conversations. Always the same bytes. chat.jinja is a template for the conversations.
"""

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


def documents() -> str:
    random_ = random.Random(4096)  # noqa: S311
    lines = []
    for number in range(400):
        sentences = max(1, round(random_.lognormvariate(1.8, 1.0)))
        text = " ".join(sentence(random_) for _ in range(sentences))
        lines.append(json.dumps({"text": text, "number": number}) + "\n")
    return "".join(lines)


def conversations() -> str:
    random_ = random.Random(512)  # noqa: S311
    lines = []
    for _ in range(40):
        messages = []
        if random_.random() < 0.5:
            messages.append({"role": "system", "content": "Answer in one sentence."})
        for _ in range(random_.randint(1, 4)):
            thing = random_.choice(SUBJECTS.split("|"))
            messages += [
                {"role": "user", "content": f"What does {thing} do?"},
                {"role": "assistant", "content": sentence(random_)},
            ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    return "".join(lines)


def main() -> None:
    folder = Path(__file__).parent
    (folder / "documents.jsonl").write_text(documents())
    (folder / "chat.jsonl").write_text(conversations())


if __name__ == "__main__":
    main()
