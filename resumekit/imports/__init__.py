"""Takes over checkpoints of other programs, as the first step of a run."""
