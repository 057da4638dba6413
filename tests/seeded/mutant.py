"""What a seeded fault consists of, and how it is written.

The tests of which one must fail, the lines of the package, and what stands there instead::

    backends/test_contract.py backends/test_files.py
    - capacity_bytes // extent_bytes)
    + capacity_bytes // extent_bytes + 1)

The lines are found wherever they are, so that code may move; where they stand in the package more
than once, `in FILE` behind the tests says which are meant.  `only --all` marks a fault that none
but long tests find.  An empty line ends a fault; a lone `-` or `+` is an empty line of its text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "multistage"


@dataclass(frozen=True)
class Mutant:
    """Lines of the package, what stands there instead, and the tests of which one must fail."""

    line: str
    instead: str
    tests: tuple[str, ...]
    place: str = ""
    only_all: bool = False

    @property
    def path(self) -> str:
        """The file that has the lines, below the package."""
        found = [
            path
            for path, text in sources().items()
            for _ in range(text.count(self.line))
            if self.place in ("", path)
        ]
        assert len(found) == 1, f"{self.line!r} is in {found or 'no file'}"
        return found[0]


@cache
def sources() -> dict[str, str]:
    """Return the text of every source of the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".c", ".h")
    }


def faults(text: str) -> tuple[Mutant, ...]:
    """Read seeded faults."""
    return tuple(_fault(part.splitlines()) for part in re.split(r"\n\n", text.strip("\n")))


def _fault(lines: list[str]) -> Mutant:
    head, *rest = lines
    assert all(re.match(r"[-+]( |$)", line) for line in rest), head
    tests, _, options = head.partition(" only --all")[0].partition(" in ")
    line, instead = ("\n".join(each[2:] for each in rest if each[0] == sign) for sign in "-+")
    return Mutant(line, instead, tuple(tests.split()), options, head.endswith(" only --all"))
