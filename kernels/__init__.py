"""Numeric operations of fastask_jax, one folder per operation.

Each folder holds `reference.py` (the definition, obviously right and slow), `xla.py` (portable,
chunked, fast) and one public function in `__init__.py` that takes `implementation=`.  This
package imports jax and nothing else of the project.  Nothing heavy happens when `kernels`
itself is imported, because `transformers` looks for a package of this name (the Hugging Face
`kernels` distribution) and imports whatever it finds; it must find that cheap and without a
`__version__`, from which it concludes that its own optional dependency is absent.
"""

# Lets `fastask_jax._guard` tell this package from the Hugging Face one.
__fastask__ = True
