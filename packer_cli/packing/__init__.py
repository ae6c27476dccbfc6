"""Which document goes to which row, from lengths alone."""
