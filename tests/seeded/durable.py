"""Faults in durable runs; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of("durable/catalogue.py", "if batch.least < needed_below or", "if", "durable/test_store.py"),
    of(
        "durable/new_file.py",
        "self._temporary, self._name, src_dir_fd",
        "self._temporary, self._name + '-', src_dir_fd",
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
        "    if arrays is None or checksum_of([record]) != checksums[0]:",
        "    if arrays is None:",
        "durable/test_run.py",
    ),
    of(
        "durable/catalogue.py",
        "        if batch.state is TransferState.FAILED or not self._lasting:",
        "        if not self._lasting:",
        "durable/test_store.py",
    ),
    of(
        "durable/catalogue.py",
        "return step < self.below and (self.kept is None or step in self.kept)",
        "return step < self.below",
        "durable/test_store.py",
    ),
)
