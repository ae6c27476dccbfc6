"""What users choose: options, shapes of records, strategies."""
