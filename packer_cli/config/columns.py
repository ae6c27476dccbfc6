"""The columns of a row, by name."""

COLUMNS = ("input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids")
DEFAULT_COLUMNS = COLUMNS[:5]
REQUIRED_COLUMNS = ("input_ids", "cu_seqlens")
VIEW_COLUMNS = ("cu_seqlens", "segments")  # what a view stores, from which all others follow
PADDED_BOUNDARIES = "cu_seqlens_padded"  # written exactly when there is a segment multiple
