"""How a run saves, resumes and passes its settled points; ``Checkpointer`` is its public face."""
