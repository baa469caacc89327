"""How a run resumes: find the newest valid checkpoint, check it, load it into the live objects."""
