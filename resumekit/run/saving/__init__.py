"""How a checkpoint is saved: what each rank writes, beside the training too, and the commit."""
