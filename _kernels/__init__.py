"""Compiled loops. Callers validate and allocate; kernels only compute (`packing/plan.py`)."""
