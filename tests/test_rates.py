"""Rates of tiers: what a text says, what is refused, and the uniform case."""

from __future__ import annotations

import pytest

from multistage import TierRates
from multistage.errors import ArgumentError


def test_a_text_says_all() -> None:
    rates = TierRates.parse("write=2GB/s, read=500 MB/s, latency=1.5ms, capacity=1GiB, shared")
    assert rates == TierRates(2e9, 5e8, 1.5e-3, 1 << 30, shared=True)
    assert TierRates.parse("write=1MiB/s") == TierRates(2.0**20, 2.0**20)
    assert not TierRates.parse("write=1GB/s,states-only").tapes
    assert TierRates.from_dict(rates.to_dict()) == rates


@pytest.mark.parametrize(
    "text",
    ["", "read=1GB/s", "write=0", "write=1GB/s,write=2GB/s", "write=-1", "speed=3", "write=x",
     "write=1GB/s,latency=3h", "write=1GB/s,shared=1", "write=1GB/s,capacity=-1"],
)  # fmt: skip
def test_what_is_no_tier_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        TierRates.parse(text)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "fast", None, True])
def test_rates_must_be_above_0(wrong: object) -> None:
    with pytest.raises(ArgumentError):
        TierRates(wrong, 1.0)  # type: ignore[arg-type]


def test_uniform_steps_are_the_special_case() -> None:
    tier = TierRates(100.0, 50.0, 0.5, capacity_bytes=95).tier(10)
    assert (tier.write_s, tier.read_s, tier.capacity_states) == (0.6, 0.7, 9)
