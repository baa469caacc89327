"""From the live objects of a training run to states that can be stored, and back.

Every state class inherits ``ComponentState``, which documents the hooks.
"""
