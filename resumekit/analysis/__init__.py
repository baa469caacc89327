"""Static analysis of training loops: which variables a checkpoint would have to hold besides."""
