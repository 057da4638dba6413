"""The gradient fuzzer's parts; `tests/fuzz_gradients.py` runs them.

None of them shares code with the package: what a run must return is computed
by keeping deep copies of everything (`oracle.py`).
"""
