"""Further locations of a run's checkpoints: copies are made in the background, and fetched.

Design: docs/design/0013-places.md. Only rank 0 opens a place.
"""
