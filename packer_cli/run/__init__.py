"""A run from beginning to end: units packed, committed, put in place."""
