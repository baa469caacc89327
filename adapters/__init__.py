"""One module for each framework; the import path names it: ``resumekit.adapters.torch``."""
