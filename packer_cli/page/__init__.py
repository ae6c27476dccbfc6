"""Pages for a browser: one HTML file each, without scripts, that needs nothing else."""
