"""Coverage-guided fuzzing of whatever is read from outside: durable files, costs, tiers.

    python tests/fuzz.py --seconds 600 --seed 0

Needs atheris.  Inputs are read or refused with an error of ours: any other
exception, more than 1 GiB of memory or 10 s for one input ends the loop with
exit 1 and leaves the input that did it in a file.  Checksums are made good
first, since no fuzzer guesses one.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["multistage"]):
    from multistage import Costs, Stage, StageCosts, Tier
    from multistage.backends import open_store
    from multistage.durable.headers import Kind, RunFacts, encode, parse_run, read_header, run_table
    from multistage.durable.records import OrderedLayout, Records
    from multistage.errors import MultistageError
    from multistage.states.layout import Layout
    from multistage.support.units import parse_bytes

RUN = b"r" * 16
RECORD_BYTES = 61
COSTS = Costs(1e-3, 2e-3, state_bytes=56, tiers=(Tier("durable", 1e-3, 1e-3),))
FACTS = RunFacts(10, "*", (("", "(7,)", "float64"),), RECORD_BYTES, "00", "label", "0.1.0")
CHAIN = StageCosts.uniform(2, Stage("layer", 1.0, 2.0, 10, 30), 10)


def durable_file(data: bytes) -> None:
    """A file of a durable run, whatever its name."""
    header = read_header(lambda count, at: data[at : at + count], len(data))
    match header.kind:
        case Kind.RUN:
            facts, _ = parse_run(header)
            is_same = replace(facts, package=FACTS.package) == FACTS  # of whatever version
            assert facts.difference(FACTS) is None if is_same else facts.difference(FACTS)
        case Kind.STATES | Kind.ADJOINT:
            found = Records.of("", header, RECORD_BYTES)
            assert len(found.steps) == len(found.checksums) > 0
            assert len(found.given) == (16 if header.kind is Kind.ADJOINT else 0)


def forged_file(data: bytes) -> None:
    """The same with a good prelude: kind, records, table."""
    records = data[1] % 8 * RECORD_BYTES if len(data) > 1 else 0
    kind: Any = data[0] % 5 if data else 0
    durable_file(encode(kind, RUN, data[2:], records) + bytes(records))


def record(data: bytes) -> None:
    """A record of states with their strides."""
    import numpy as np

    layout = OrderedLayout.like(Layout.of({"a": np.zeros((2, 3)), "b": np.zeros(5, np.int8)}))
    found = layout.split(np.frombuffer(data, np.uint8))
    assert found is None or len(layout.unpack(found, None)) == 2


def costs(data: bytes) -> None:
    """Costs of a uniform chain; what is read is written and read again."""
    found = Costs.from_json(data.decode(errors="replace"))
    assert Costs.from_json(found.to_json()) == found


def chain(data: bytes) -> None:
    """Costs of a chain of unequal stages."""
    found = StageCosts.from_json(data.decode(errors="replace"))
    assert StageCosts.from_json(found.to_json()) == found


def tier(data: bytes) -> None:
    """The name of a tier.  None is opened."""
    open_store(data.decode(errors="replace"))


def size(data: bytes) -> None:
    """A number of bytes."""
    assert parse_bytes(data.decode(errors="replace")) >= 0


TARGETS: tuple[Callable[[bytes], None], ...] = (
    durable_file,
    forged_file,
    record,
    costs,
    chain,
    tier,
    size,
)
SEEDS: tuple[bytes, ...] = (
    b"\0" + encode(Kind.RUN, RUN, run_table(FACTS, COSTS), 0),
    b"\1\1\0" + run_table(FACTS, COSTS),
    b"\1\2\1" + bytes(16),
    b"\1\3\1" + bytes(32),
    b"\2" + bytes(RECORD_BYTES),
    b"\3" + COSTS.to_json().encode(),
    b"\4" + CHAIN.to_json().encode(),
    b"\5file:///scratch?capacity=10GiB&buffers=8MiB > memory:1GiB?queue=2",
    b"\5memory:?capacity=1GiB&compress=blosc",
    b"\6" + b"512.5 MiB",  # apart, or \651 would be the escape
)


def one(data: bytes) -> None:
    """Give an input to the target that its first byte names."""
    if not data:
        return
    with contextlib.suppress(MultistageError):  # BadFile is one
        TARGETS[data[0] % len(TARGETS)](data[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--runs", type=int, default=-1, help="end after so many inputs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            one(seed)
            Path(corpus, str(number)).write_bytes(seed)
        options = {
            "max_total_time": given.seconds,
            "runs": given.runs,
            "seed": given.seed + 1,  # 0 stands for a random one
            "max_len": 4096,
            "timeout": 10,
            # Linux counts the peak of whoever started this process as its own.
            "rss_limit_mb": 1024 + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "print_final_stats": 1,
        }
        atheris.Setup(
            [sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), corpus], one
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
