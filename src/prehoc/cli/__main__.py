"""Run the command line as ``python -m prehoc.cli``."""

from prehoc.cli import main

main()
