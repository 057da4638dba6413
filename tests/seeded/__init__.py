"""Seeded faults by area: each one that somebody could make, and the tests that must see it."""

from __future__ import annotations

from seeded import durable, interop, planners, runs, stores, torch
from seeded.mutant import Mutant as Mutant

MUTANTS: tuple[Mutant, ...] = (
    *planners.FAULTS,
    *runs.FAULTS,
    *stores.FAULTS,
    *durable.FAULTS,
    *interop.FAULTS,
    *torch.FAULTS,
)
