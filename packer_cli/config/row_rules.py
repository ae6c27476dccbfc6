"""Which options of rows go together, for the command line and for `plan_packing` alike."""

from __future__ import annotations

from collections.abc import Callable

from packer_cli.errors import UsageError, one_of

MAX_LENGTH_LIMIT = 1 << 24
BALANCES = ("none", "attention")
_UNLIMITED = {
    "wrap": "wrap fills every row to its end, whatever the number of segments",
    "mffd": "with a limit mffd would not keep within 71/60 of the fewest rows",
}
_UNBALANCED = {
    "next-fit": "next-fit keeps the order of documents, exchanges would undo it",
    "wrap": "wrap keeps the order of documents, exchanges would undo it",
    "harmonic": "harmonic puts documents of similar length together, exchanges would undo it",
}


def check_row_options(
    strategy: str,
    max_length: int,
    max_segments: int | None,
    segment_multiple: int,
    balance: str,
    spelled: Callable[[str], str],
) -> None:
    """UsageError when these do not go together. `spelled`: a name as its user writes it."""
    name = spelled("max_segments_per_row")
    if max_segments is not None:
        if not 1 <= max_segments <= MAX_LENGTH_LIMIT:
            raise UsageError(f"{name}: {max_segments} is not between 1 and {MAX_LENGTH_LIMIT}")
        if strategy in _UNLIMITED:
            raise UsageError(
                f"{name}: {_UNLIMITED[strategy]}", "choose another strategy, such as best-fit"
            )
    name = spelled("segment_multiple")
    if segment_multiple < 1:
        raise UsageError(f"{name}: {segment_multiple} is not positive")
    if max_length % segment_multiple:
        raise UsageError(
            f"{name}: {spelled('max_length')} {max_length} is not a multiple of {segment_multiple}",
            f"use {max_length - max_length % segment_multiple or segment_multiple} tokens a row",
        )
    if balance not in BALANCES:
        raise one_of(spelled("balance"), balance, BALANCES)
    if balance != "none" and strategy in _UNBALANCED:
        raise UsageError(
            f"{spelled('balance')}: {_UNBALANCED[strategy]}",
            "choose another strategy, such as best-fit",
        )
