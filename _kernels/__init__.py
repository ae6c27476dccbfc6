"""Compiled loops. Callers validate and allocate; kernels only compute (see `packing/planning.py`)."""
