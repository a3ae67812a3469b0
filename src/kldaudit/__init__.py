"""Find out what a published KL-divergence number of a quantized language model is worth."""

__version__ = "0.1.0"

METHOD_VERSION = "1"
"""Moves whenever a number that kldaudit reports may move; see *Methodology* in CHANGELOG.md."""
