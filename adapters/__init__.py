"""One module or package for each framework, named like it: ``resumekit.adapters.torch``."""
