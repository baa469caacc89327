"""The content of a checkpoint: nested state and tensors, without pickle, and their digests."""
