"""``python -m resumekit.cli``."""

from resumekit.cli import main

main()
