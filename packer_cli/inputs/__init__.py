"""From paths to records: discovery, work units, a reader per format."""
