"""Random chains under random plans with a slow tier; see `fuzz_tiers.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # of all tests, where it runs as a script
