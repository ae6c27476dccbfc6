"""Which documents of which sources make up a result, and how often: from indexes alone."""
