"""What several adapters need of one framework, a file each; the rest of the core imports none.

A framework may be built on another one: Hugging Face's Trainer has an Accelerator, and that may
have made a DeepSpeed engine. No adapter imports another, so what they share stands here.
"""
