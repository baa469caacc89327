"""How a run saves, resumes and passes its safe points; ``Checkpointer`` is its public face."""
