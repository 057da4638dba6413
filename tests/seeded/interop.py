"""Faults in MPI, pyrevolve and checkpoint_schedules; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of(
        "interop/agreed.py",
        "        if arrays is not None and first == ranks.size:",
        "        if arrays is not None:",
        "interop/test_agreed.py",
    ),
    of(
        "interop/ranks.py",
        "                if value != found[0][name]:",
        "                if False:",
        "interop/test_mpi_reversal.py",
    ),
    of(
        "interop/ranks.py",
        "            if other != found[0][0]:",
        "            if False:",
        "interop/test_mpi_reversal.py",
    ),
    of(
        "interop/checkpoint_schedules/ours.py",
        "        seen.kept[index] = True",
        "        seen.kept[index] = False",
        "interop/test_checkpoint_schedules.py",
    ),
    of(
        "interop/checkpoint_schedules/ours.py",
        "                    self._r += action.n1 - action.n0",
        "                    self._r += 1",
        "interop/test_checkpoint_schedules.py",
    ),
    of(
        "interop/agreed.py",
        "                self._missing.add(key)\n                self._full = True",
        "                self._missing.add(key)",
        "interop/test_agreed.py",
    ),
    of(
        "interop/agreed.py",
        "        self._missing.discard(key)",
        "        pass",
        "interop/test_agreed.py",
    ),
    of(
        "interop/pyrevolve/revolvers.py",
        "        self._slots = TRANSIT if on_disk else n_checkpoints",
        "        self._slots = n_checkpoints",
        "interop/test_pyrevolve.py",
    ),
)
