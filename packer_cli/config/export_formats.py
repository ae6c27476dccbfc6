"""What the formats of `packer export` are called; `export/` has a file for each."""

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
)
