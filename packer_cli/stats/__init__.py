"""What the manifest of a result says, as figures and as a table."""
