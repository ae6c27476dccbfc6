"""Rows taken apart again, for people to look at."""
