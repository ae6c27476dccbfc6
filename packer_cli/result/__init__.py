"""What a result is, for those who write it and those who read it."""
