"""The golden table of conversations: template, options, records → what is trained on, in ⟦⟧.

`golden_chats.json` is a list of runs. A message there is {role: content, …}; an outcome is the text
of a record, a list of texts with `--turns each` and of pairs, or {"error": …}, why the record is a
bad one. With a run stands what its manifest counts, but for zeros. Texts are written by hand or
read by somebody before they are put there: the table says what is right. A text without ⟦⟧ is that
of a document that is dropped, as it is not trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import Json, marked_by_place, pack_chat, positions

from packer_cli.records import record_position
from packer_cli.result.wording import UNSHOWN

RUNS = json.loads(Path(__file__).with_name("golden_chats.json").read_text(encoding="utf-8"))
COUNTED = (
    "trained_turns", "empty_turns", "masked_documents", "masked_tokens", "unread",
    "unshown_documents", *(f"unshown_{what}{of}" for what in UNSHOWN for of in ("", "_turns")),
)  # fmt: skip


def record_of(case: Any) -> Json:
    """A record of the table as it is packed."""
    record = case if isinstance(case, dict) else {"messages": case}
    return {
        name: [_message(one) for one in value] if isinstance(value, list) else value
        for name, value in record.items()
    }


def _message(short: Any) -> Any:
    if not isinstance(short, dict) or {"role", "from", "type"} & short.keys():
        return short
    (role, content), *more = short.items()
    return {"role": role, "content": content, **dict(more)}


def outcomes(
    records: list[Json], template: str | None, options: list[str]
) -> tuple[list[Any], Json]:
    """(what became of each record, what the manifest counts)."""
    manifest = pack_chat(records, "--on-error", "skip", *options, template=template)
    each = "each" in options
    texts: dict[int, list[str]] = {}
    for (place, _), text in sorted(marked_by_place("out").items()):
        texts.setdefault(record_position(place, "each" if each else "all"), []).append(text)
    found: dict[int, Any] = {
        position: own if each or len(own) > 1 else own[0] for position, own in texts.items()
    }
    if manifest["rejected_records"]:
        for line in Path("out/rejected.jsonl").read_text(encoding="utf-8").splitlines():
            rejected = json.loads(line)
            found[rejected["position"]] = {"error": rejected["reason"]}
    counts = {name: manifest[name] for name in COUNTED if manifest.get(name)}
    return [found.get(position) for position in positions(records)], counts


def kept(outcome: Any) -> Any:
    """What a pack keeps of an outcome: texts in which something is trained on; None for nothing."""
    texts = [one for one in outcome if "⟦" in one] if isinstance(outcome, list) else []
    if isinstance(outcome, dict) or texts:
        return texts or outcome
    return outcome if "⟦" in outcome else None


@pytest.mark.parametrize("run", RUNS, ids=[run["what"] for run in RUNS])
def test_golden_chats(folder: Path, run: Json) -> None:
    records = [record_of(case) for case, _ in run["cases"]]
    told, counts = outcomes(records, run["template"], run["options"])
    assert told == [kept(outcome) for _, outcome in run["cases"]]
    assert counts == run["counts"]
