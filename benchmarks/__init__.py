"""Benchmarks: one module per claim, run as `python -m benchmarks.NAME`."""
