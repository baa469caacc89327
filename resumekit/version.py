"""The version, low enough that every layer may record it."""

__version__ = "0.1.0"
