"""Eyas trains EAGLE-3 speculative-decoding drafters; see docs/decisions.md."""

__version__ = "0.1.0"
