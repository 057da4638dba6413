"""Coverage-guided fuzzing for some seconds; `fuzz.py` for as long as one likes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


def test_external_data_is_read_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("atheris", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, FUZZ, "--runs", "20000", "--seconds", "60"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "stat::number_of_executed_units: 2000" in done.stderr
    assert list(tmp_path.iterdir()) == []
