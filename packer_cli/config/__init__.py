"""What can be asked for: options, shapes of records, strategies."""
