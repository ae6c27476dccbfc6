"""The names of the formats of `packer export`; `export/` has a file for each."""

EXPORT_FORMATS = (
    "trl",
    "llamafactory",
    "axolotl",
    "megatron",
    "megatron-bridge",
    "nanotron",
    "numpy",
    "parquet",
    "unpacked",
    "packed",
)
