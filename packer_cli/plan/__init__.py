"""Plans of what packing would give, for several lengths of rows at once, with nothing written."""
