"""The command line: options, messages, exit codes, and nothing else."""
