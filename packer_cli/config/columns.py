"""The columns of a row, by name."""

from collections.abc import Sequence

COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
VIEW_COLUMNS = ("cu_seqlens", "segments")  # what a view stores, from which all others follow
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple
PAIR, SIDE = PAIR_COLUMNS = ("pair", "side")  # written exactly for records of preference
OF_SEGMENTS = ("segments", *PAIR_COLUMNS)  # with a value for each segment


def view_columns(columns: Sequence[str]) -> list[str]:
    """What a view stores of these columns."""
    return [*VIEW_COLUMNS, *(name for name in PAIR_COLUMNS if name in columns)]
