"""Results: their files, written and read."""
