"""What a seeded fault consists of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A line of a file, what stands there instead, and the tests of which one must fail.

    With `only_all`, that one is long: `scripts/test --all` finds the fault, `scripts/test` does not.
    """

    path: str
    line: str
    instead: str
    tests: tuple[str, ...]
    only_all: bool = False

    @property
    def name(self) -> str:
        return f"{self.path}: {self.instead.strip()[:60]!r}"


def of(path: str, line: str, instead: str, *tests: str, only_all: bool = False) -> Mutant:
    """Return the fault of a path in the package."""
    return Mutant(path, line, instead, tests, only_all)
