"""`python -m packer_cli`."""

from packer_cli.cli import main

main()
