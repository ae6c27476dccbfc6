"""What a result says of itself, as figures and as a table."""
