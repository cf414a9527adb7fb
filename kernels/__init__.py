"""Numeric ops: reference, XLA and Pallas forms.  Imports jax and nothing of ours."""

# Tells this package from Hugging Face's of the same name (see fastask_jax/_guard.py).
__fastask__ = True
