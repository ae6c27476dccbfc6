"""What a recipe's result has of each source, and where its stages begin: figures and lines."""

from __future__ import annotations

from typing import Any

from packer_cli.config.mixture import TRAIN
from packer_cli.result.manifest import DOCUMENT_TOTALS, Manifest
from packer_cli.result.sources import by_source, shares
from packer_cli.result.wording import count, percent
from packer_cli.stats.headline import unusual

# What inputs are counted by, as columns: the rest of a name is what the tables begin with.
_TITLES = {
    "documents": "documents", "tokens": "tokens", "trained_tokens": "trained",
    "empty_documents": "empty", "rejected_records": "rejected",
    "truncated_documents": "truncated", "truncated_tokens": "tokens cut off",
    "dropped_documents": "dropped", "dropped_tokens": "their tokens",
    "untrained_documents": "untrained", "untrained_tokens": "their tokens",
}  # fmt: skip
RECORDS = "counted when sources were tokenized, each record once"
MISSED = "shares that are off, in {}: documents stay whole"
_ALWAYS = ("documents", "tokens", "trained_tokens")


def counted(manifest: Manifest) -> str:
    """What amounts count: tokens, or trained tokens."""
    return "trained tokens" if _mixture(manifest).get("count") == "trained" else "tokens"


def share_rows(manifest: Manifest) -> list[list[str]]:
    """What is packed of every source, and its share; the first row has the titles."""
    counts = by_source(manifest)
    names = [name for name in _ALWAYS if all(name in one for one in counts)]
    rows = [[*(_TITLES[name] for name in names), "epochs", "asked", "reached", "source"]]
    for one, own, of_all in zip(manifest.sources, counts, shares(manifest.sources), strict=True):
        figures = [count(own[name]) for name in names]
        rows.append([*figures, f"{one.epochs:.2f}", *map(percent, of_all), one.name])
    return rows


def left_out_rows(manifest: Manifest) -> list[list[str]]:
    """What of every source is on the other side of the split, or equal to others; [] for none."""
    is_train = _mixture(manifest).get("part", TRAIN) == TRAIN
    figures = [
        ("held out", [one.held_out_documents if is_train else 0 for one in manifest.sources]),
        ("duplicates", [one.duplicate_documents for one in manifest.sources]),
    ]
    return _rows(manifest, figures)


def pool_rows(manifest: Manifest) -> list[list[str]]:
    """What an epoch of every source has, what is asked of it and taken."""
    what = counted(manifest)
    return _rows(manifest, [
        ("documents", [one.documents for one in manifest.sources]),
        (what, [one.available for one in manifest.sources]),
        ("asked", [round(one.asked) for one in manifest.sources]),
        ("taken", [one.taken for one in manifest.sources]),
    ])  # fmt: skip


def loss_rows(manifest: Manifest) -> list[list[str]]:
    """What every source has lost, or may be wrong with it; [] for nothing."""
    counts = by_source(manifest)
    names = [name for name in counts[0] if name not in (*_ALWAYS, "name")] if counts else []
    return _rows(manifest, [
        (_TITLES.get(name, name), [one.get(name, 0) for one in counts]) for name in names
    ])  # fmt: skip


def missed_rows(manifest: Manifest) -> list[list[str]]:
    """Shares that are off, since documents stay whole, and how long the document at the end of what
    is taken is; [] for none.
    """
    rows = [["asked", "got", "share off", "document at its end", "source"]]
    for one in manifest.missed_shares:
        stage = [] if one.stage is None else manifest.stages[one.stage : one.stage + 1]
        where = "".join(f", stage {its.name or (one.stage or 0) + 1}" for its in stage)
        document = count(one.document) if one.document else "-"
        figures = count(round(one.asked)), count(one.taken), percent(one.off), document
        rows.append([*figures, f"{one.source}{where}"])
    return rows if manifest.missed_shares else []


def record_rows(manifest: Manifest) -> list[list[str]]:
    """What is out of the ordinary about the records of sources, read once each; [] for nothing."""
    nothing = dict.fromkeys(DOCUMENT_TOTALS, 0)
    rows = [["count", "what", "source"]]
    for one in manifest.source_records:
        for title, figure, _ in unusual(nothing | one.totals):
            if figure:
                rows.append([count(figure), title, one.name])
        rows += [[count(figure), f"unread {name}", one.name] for name, figure in one.unread.items()]
    return rows if len(rows) > 1 else []


def tables(manifest: Manifest, *, detail: bool) -> list[tuple[str, list[list[str]]]]:
    """(title, rows) of all that there is to say of sources and stages; [] without a recipe.

    `detail`: of sources, all figures.
    """
    if not manifest.sources:
        return []
    what = counted(manifest)
    found = [
        (f"sources, in shares of {what}", share_rows(manifest)),
        (MISSED.format(what), missed_rows(manifest)),
        ("documents left out", left_out_rows(manifest)),
    ]
    found.append((RECORDS, record_rows(manifest)))
    if detail:
        found.append((f"one epoch of each source, and {what} asked of it and taken",
                      pool_rows(manifest)))  # fmt: skip
        found.append(("lost", loss_rows(manifest)))
    found.append(("stages", stage_rows(manifest)))
    return [(title, rows) for title, rows in found if rows]


def stage_rows(manifest: Manifest) -> list[list[str]]:
    """Which rows each stage has; [] without stages."""
    rows = [["first row", "rows", "stage"]]
    for number, one in enumerate(manifest.stages, 1):
        rows.append([count(one.first_row), count(one.rows), one.name or str(number)])
    return rows if manifest.stages else []


def _rows(manifest: Manifest, figures: list[tuple[str, list[int]]]) -> list[list[str]]:
    """With a column for each of the figures that any source has."""
    shown = [(title, values) for title, values in figures if any(values)]
    rows = [[*(title for title, _ in shown), "source"]]
    for place, one in enumerate(manifest.sources):
        rows.append([*(count(values[place]) for _, values in shown), one.name])
    return rows if shown else []


def _mixture(manifest: Manifest) -> dict[str, Any]:
    mixture: dict[str, Any] | None = manifest.document["config"].get("mixture")
    return mixture or {}
