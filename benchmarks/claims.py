"""What the papers publish, beside what was measured: agrees, differs, or not known.

The published numbers are in `published.json`; the measured ones are `ratios` of
the benchmarks' results.  A verdict is computed, never typed in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PUBLISHED = Path(__file__).with_name("published.json")
Verdict = Literal["agrees", "differs", "not run", "no counterpart"]
TESTS = frozenset({"relative", "within", "min", "max", "equals", "above", "up_to"})


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim of a paper and what became of it.

    Attributes
    ----------
    claim : dict
        As in `published.json`.
    verdict : str
    measured : float or None
    """

    claim: Mapping[str, Any]
    verdict: Verdict
    measured: float | None

    @property
    def published_text(self) -> str:
        """The published number with its unit, or what is asserted instead."""
        value = self.claim["published"]
        return "-" if value is None else number(value, self.claim["unit"])

    @property
    def measured_text(self) -> str:
        """The measured number with its unit."""
        return "-" if self.measured is None else number(self.measured, self.claim["unit"])

    @property
    def note(self) -> str:
        """How it was compared, and where it differs why."""
        how, why = self.claim.get("how", ""), self.claim.get("why", "")
        if self.verdict != "differs":
            return str(how)
        return f"{how}. Why: {why or 'not known'}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**self.claim, "value": self.measured, "verdict": self.verdict}


def load(path: Path = PUBLISHED) -> dict[str, Any]:
    """Return the papers and their claims."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def holds(test: Mapping[str, float], value: float, published: float | None) -> bool:
    """Whether a measured value agrees with a claim, by all parts of its test."""
    unknown = set(test) - TESTS
    if unknown or not test:
        raise ValueError(f"test {dict(test)} must be made of {', '.join(sorted(TESTS))}")
    results = []
    for kind, bound in test.items():
        if kind in ("relative", "within"):
            if published is None:
                raise ValueError(f"test {kind!r} needs a published number")
            span = bound * abs(published) if kind == "relative" else bound
            results.append(abs(value - published) <= span)
        else:
            results.append(
                {
                    "min": value >= bound,
                    "max": value <= bound,
                    "equals": value == bound,
                    "above": value > bound,
                    "up_to": value <= bound,
                }[kind]
            )
    return all(results)


def judge(claim: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Judged:
    """Return a claim with its verdict; `results` are those of the benchmarks that ran."""
    if claim["benchmark"] is None:
        return Judged(claim, "no counterpart", None)
    ratios = results.get(claim["benchmark"], {}).get("ratios", {})
    value = ratios.get(claim["measured"])
    if not isinstance(value, int | float) or not math.isfinite(value):
        return Judged(claim, "not run", None)
    agrees = holds(claim["test"], value, claim["published"])
    return Judged(claim, "agrees" if agrees else "differs", value)


def judge_all(results: Mapping[str, Mapping[str, Any]]) -> list[Judged]:
    """Return every claim with its verdict."""
    return [judge(claim, results) for claim in load()["claims"]]


def number(value: float, unit: str = "") -> str:
    """Return a number with at most four digits and its unit.

    Examples
    --------
    >>> number(13.4987, "GiB"), number(2, "x"), number(99.0)
    ('13.5 GiB', '2 x', '99')
    """
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".strip()
