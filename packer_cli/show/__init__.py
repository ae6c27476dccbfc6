"""Rows taken apart again, to look at."""
