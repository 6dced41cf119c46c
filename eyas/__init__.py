"""Raise an EAGLE-3 draft head for a target and prove it before serving. Imports nothing heavy."""

from eyas.artifact import VERSION as __version__

__all__ = ["__version__"]
