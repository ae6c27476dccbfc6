"""What of the inputs has no effect on a result is said once: nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packer_cli.config.shapes import ARGUMENTS, LABEL, Shape
from packer_cli.errors import nearest
from packer_cli.records import Notify
from packer_cli.result.manifest import DOCUMENT_TOTALS, Input, Manifest, Result
from packer_cli.result.manifest_check import shape_of
from packer_cli.result.manifest_file import as_named
from packer_cli.result.wording import count, percent, plural, unshown
from packer_cli.run.chosen import Chosen

_MOST_NAMED = 12
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
        line = f"{paths[0]}{rest}: no option uses the {what} {_named(names)}; see --field"
        if LABEL in names and shape is None:
            warn(f"warning: {line}, and --shape preference if it says which answers are good")
        elif {"chosen", "rejected"} <= {*names}:
            notify(f"{line}, and --shape preference for pairs")
        else:
            notify(line)


def warn_of_losses(
    place: str, manifest: Result, chosen: Chosen, notify: Notify, warn: Notify
) -> None:
    """Say what chat templates left out, which fields of records nobody reads, and which documents
    are there twice.
    """
    if copies := _copies(manifest):
        more = f"; so have {len(copies) - 1:,} more" if len(copies) > 1 else ""
        (first, second), documents = copies[0], sum(one.documents for _, one in copies)
        there = "are there more than once" if documents > 1 else "is there more than once"
        warn(
            f"warning: {place}: {plural(documents, 'document')} {there}: {as_named(second.path)} "
            f"has the content of {as_named(first.path)}{more}; name one of such files"
        )
    if manifest.rejected_files:
        named = [one.path for one in manifest.inputs_now.values() if one.rejected_files]
        warn(
            f"warning: {place}: leaves out {plural(manifest.rejected_files, 'input')} that cannot "
            f"be decoded: {_named(named)}; see rejected.jsonl; once mended, use --update"
        )
    figures = {name: getattr(manifest, name) for name in DOCUMENT_TOTALS}
    if manifest.unshown_documents:
        way_out = f"use {_way_out(manifest)}; --on-unshown error ends such runs"
        warn(
            f"warning: {place}: of {plural(manifest.unshown_documents, 'document')} the chat "
            f"template does not show: {unshown(figures)}; {way_out}"
        )
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
        named = [f"{name} ({count(number)}){_meant(name, chosen)}" for name, number in
                 manifest.unread.items()]  # fmt: skip
        notify(f"{place}: neither packer nor the chat template reads {_named(named)}")


def _copies(manifest: Result) -> list[tuple[Input, Input]]:
    """Inputs with the content of an earlier one, which comes first. What a recipe takes of its
    sources is not of interest here: it has epochs.
    """
    if isinstance(manifest, Manifest) and manifest.sources:
        return []
    first, copies = dict[str, Input](), list[tuple[Input, Input]]()
    for one in manifest.inputs_now.values():
        other = first.setdefault(one.sha256, one)
        if other is not one and one.documents:
            copies.append((other, one))
    return copies


def _way_out(manifest: Result) -> str:
    """Of what a template does not show."""
    of_conversations = any(one.is_chat for one in _shapes(manifest))
    if manifest.unshown_reasoning and of_conversations and manifest.config.turns == "all":
        return (
            "--turns each where only earlier turns lose their reasoning, or a --chat-template "
            "that shows all of it"
        )
    return "a --chat-template that shows all of it"


def _shapes(manifest: Result) -> Iterable[Shape]:
    shape = shape_of(manifest)
    return shape.members.values() or [shape]


def encoded_tokens(manifest: Result) -> int:
    """The tokens that a run made, those that were lost included."""
    lost = ("truncated_tokens", "dropped_tokens")
    return manifest.tokens + sum(getattr(manifest, name, 0) for name in lost)


def _named(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _MOST_NAMED
    return ", ".join(all_names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _meant(name: str, chosen: Chosen) -> str:
    place, _, key = name.partition(".")
    known: Iterable[str] = _ANSWERED if place == "messages" else ()
    if key and place == ARGUMENTS:
        known = chosen.arguments_read()
    near = nearest(key, known)
    return f", did you mean {near}?" if near else ""
