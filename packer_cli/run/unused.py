"""What of the inputs has no effect on a result is said once: nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packer_cli.config.shapes import ARGUMENTS, LABEL
from packer_cli.errors import nearest
from packer_cli.records import Notify
from packer_cli.result.manifest import Result
from packer_cli.result.warnings import RAW, encoded_tokens, named, warnings_of
from packer_cli.result.wording import count, percent, plural
from packer_cli.run.chosen import Chosen

_ANSWERED = (
    "content", "reasoning_content", "thinking", "tool_calls", "weight", "train", "train_detail",
)  # fmt: skip


def name_columns(
    unused: Mapping[str, list[str]], shape: str | None, notify: Notify, warn: Notify
) -> None:
    """Name columns of supervised inputs that no option uses. `unused`: by path; `shape`: --shape.

    A label is worth a warning where nobody chose the shape: answers that it calls bad would be
    learned as good ones.
    """
    by_columns: dict[tuple[str, ...], list[str]] = {}
    for path, columns in unused.items():
        if columns:
            by_columns.setdefault(tuple(columns), []).append(path)
    for names, paths in by_columns.items():
        rest = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        what = "column" if len(names) == 1 else "columns"
        line = f"{paths[0]}{rest}: no option uses the {what} {named(names)}; see --field"
        if LABEL in names and shape is None:
            warn(f"warning: {line}, and --shape preference if it says which answers are good")
        elif {"chosen", "rejected"} <= {*names}:
            notify(f"{line}, and --shape preference for pairs")
        else:
            notify(line)


def warn_of_losses(
    place: str, manifest: Result, chosen: Chosen, notify: Notify, warn: Notify, *, raw: bool
) -> None:
    """Say what was lost or left out, and which fields of records nobody reads. `raw`: whether the
    user asked for prompts as they are.
    """
    for one in warnings_of(manifest):
        if not (raw and one.about == RAW):
            warn(f"warning: {place}: {one}")
    if manifest.empty_turns:
        notify(
            f"{place}: {plural(manifest.empty_turns, 'turn')} of the assistant that the chat "
            "template leaves empty: not trained on"
        )
    if manifest.masked_documents:
        notify(
            f"{place}: {plural(manifest.masked_tokens, 'token')} of the assistant in "
            f"{plural(manifest.masked_documents, 'document')} not trained on, by options or flags"
        )
    if manifest.repeated_tokens:
        share = percent(manifest.repeated_tokens / encoded_tokens(manifest))
        notify(
            f"{place}: {plural(manifest.repeated_tokens, 'token')} repeated ({share}): each "
            "document of a turn begins with the conversation before it"
        )
    if manifest.unread:
        names = [f"{name} ({count(number)}){_meant(name, chosen)}" for name, number in
                 manifest.unread.items()]  # fmt: skip
        notify(f"{place}: neither packer nor the chat template reads {named(names)}")


def _meant(name: str, chosen: Chosen) -> str:
    place, _, key = name.partition(".")
    known: Iterable[str] = _ANSWERED if place == "messages" else ()
    if key and place == ARGUMENTS:
        known = chosen.arguments_read()
    near = nearest(key, known)
    return f", did you mean {near}?" if near else ""
