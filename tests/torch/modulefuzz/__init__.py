"""Random modules and the programs that train them; see `fuzz_modules.py`."""
