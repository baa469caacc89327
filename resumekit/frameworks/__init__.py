"""What two or more adapters need of one framework; the rest of the core imports no framework.

A framework may be built on another one: Hugging Face's Trainer has an Accelerator, and that may
have made a DeepSpeed engine. No adapter imports another, so what they share is here.
"""
