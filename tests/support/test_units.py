"""Sizes and times as texts."""

from __future__ import annotations

import pytest

from multistage.errors import ArgumentError
from multistage.support.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("1 kB", 1_000),
        ("1KiB", 1_024),
        ("1.5 MiB", 3 << 19),
        ("2G", 2 << 30),
        (".5 TB", 5 * 10**11),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "x", "1 parsec", "-1", "1e3", "MiB", -1, True, 1.5])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ArgumentError, match="size"):
        parse_bytes(text)


def test_formats() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 << 30, 5 << 40)] == [
        "12 B",
        "2.00 KiB",
        "3.00 GiB",
        "5.00 TiB",
    ]
    assert [format_seconds(t) for t in (0, 2, 0.0021, 3.4e-5, 2e-8, float("inf"))] == [
        "0 s",
        "2 s",
        "2.1 ms",
        "34 us",
        "20 ns",
        "inf s",
    ]


def test_times() -> None:
    assert [parse_seconds(t) for t in ("2", "0.5s", "3ms", "4us", "5ns", "1e-3", "1e3us")] == [
        2.0,
        0.5,
        0.003,
        4e-6,
        5e-9,
        1e-3,
        1e-3,
    ]
    for bad in ("", "ms", "1 hour", "-1", "1.2.3"):
        with pytest.raises(ArgumentError, match="time"):
            parse_seconds(bad)
