"""Rows taken apart, to look at."""
