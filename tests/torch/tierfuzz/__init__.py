"""Random chains under random plans with a slow tier; see `fuzz_tiers.py`."""
