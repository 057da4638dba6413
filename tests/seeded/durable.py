"""Faults in durable runs; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of("durable/store.py", "if batch.least < needed_below or", "if", "durable/test_store.py"),
    of(
        "durable/folder.py",
        "os.rename(self._temporary, self._name, src",
        "os.rename(self._temporary, self._name + '-', src",
        "durable/test_folder.py",
    ),
    of(
        "durable/adjoints.py",
        "if newest is not None and newest.given != given:",
        "if False:",
        "durable/test_run.py",
    ),
    of(
        "durable/run.py",
        "            if agreed.adjoint is not None and each.step < agreed.adjoint:",
        "            if False:",
        "interop/test_mpi_durable.py",
    ),
    of(
        "durable/folder.py",
        "        if found is None or found[0] != self.run:\n            return False",
        "        if found is None:\n            return False",
        "durable/test_folder.py",
    ),
    of(
        "durable/folder.py",
        "            if size != file_bytes:",
        "            if False:",
        "durable/test_folder.py",
        "durable/test_store.py",
    ),
    of(
        "durable/run.py",
        "                folder.unlink(each.name)  # a rank that was further goes back",
        "                pass",
        "interop/test_mpi_durable.py",
    ),
    of(
        "durable/journal.py",
        "    if arrays is None or checksum_of([record]) != checksum:",
        "    if arrays is None:",
        "durable/test_run.py",
    ),
    of(
        "durable/store.py",
        "        if batch.state is TransferState.FAILED or not self._lasting:",
        "        if not self._lasting:",
        "durable/test_store.py",
    ),
    of(
        "durable/store.py",
        "            if step not in steps:",
        "            if False:",
        "durable/test_store.py",
    ),
)
