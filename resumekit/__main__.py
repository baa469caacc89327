"""``python -m resumekit``."""

from resumekit.cli import main

main()
