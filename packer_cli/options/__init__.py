"""Options of commands and recipes, shapes of records, and strategies."""
