"""Benchmarks, run with `python -m experiments.bench.NAME`; the last line is one JSON object."""
