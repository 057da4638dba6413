"""Faults in stores; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of(
        "backends/streamed.py",
        "self._hold.take()\n        try:\n            self._open(layout)",
        "try:\n            self._open(layout)",
        "backends/test_lifetimes.py",
    ),
    of(
        "backends/staging.py",
        "before.buffer = None",
        "pass",
        "backends/test_contract.py",
        "backends/test_streamed.py",
    ),
    of(
        "backends/space.py",
        "capacity_bytes // extent_bytes)",
        "capacity_bytes // extent_bytes + 1)",
        "backends/test_contract.py",
        "backends/test_files.py",
    ),
    of(
        "backends/carrier.py",
        "if self._verify and found != flight.checksum:",
        "if self._verify and found == 0:",
        "backends/test_files.py",
        "backends/test_contract.py",
    ),
    of(
        "backends/carrier.py",
        "if flight.behind is not None:",
        "if False:",
        "backends/test_streamed.py",
        "backends/test_contract.py",
    ),
    of(
        "backends/arena.py",
        "self._lent[number] = weakref.ref(buffer, back)",
        "back(weakref.ref(buffer))",
        "backends/test_arena.py",
        "backends/test_contract.py",
    ),
    of(
        "backends/medium.py",
        "np.copyto(extent[offset : offset + len(data)], data)",
        "np.copyto(extent[: len(data)], data)",
        "backends/test_contract.py",
    ),
    of(
        "backends/direct.py",
        "position = slot * self._extent_bytes\n",
        "position = slot * self._extent_bytes // 2\n",
        "backends/test_contract.py",
    ),
    of(
        "backends/aio.py",
        "await file.seek(offset)",
        "await file.seek(0)",
        "backends/test_contract.py",
    ),
    of(
        "backends/private.py",
        "if found.st_mode & stat.S_IWOTH:",
        "if False:",
        "backends/test_private.py",
    ),
    of("backends/native.py", "sum=extent.checksum,", "sum=0,", "backends/test_contract.py"),
    of("native/io.c", "job->error = error;", "job->error = 0;", "backends/test_native.py"),
    of("native/io_bytes.c", "done -= done % PAGE;", ";", "backends/test_native.py"),
    of("backends/numa.py", "if self._node not in there:", "if False:", "backends/test_numa.py"),
    of(
        "backends/remote.py",
        "for job in jobs:\n                        job.result()\n",
        "pass\n",
        "backends/test_remote.py",
    ),
    of(
        "backends/compressed.py",
        "if not error <= self._tolerance:",
        "if error > 10 * self._tolerance:",
        "backends/test_compressed.py",
    ),
    of(
        "backends/cascade.py",
        "self.capacity_bytes = (upper + lower) * extent_bytes",
        "self.capacity_bytes = upper * extent_bytes",
        "backends/test_contract.py",
    ),
    of(
        "backends/levels.py",
        "        if place.moving:\n            return None\n        if place.where is Where.LOST:",
        "        if place.where is Where.LOST:",
        "backends/test_cascade.py",
    ),
    of(
        "backends/levels.py",
        "self._above.move_to_end(place, last=False)",
        "self._above.move_to_end(place)",
        "backends/test_cascade.py",
    ),
    of(
        "backends/carrier.py",
        "if extent.cancelled:\n                raise",
        "if False:\n                raise",
        "backends/test_cancelled.py",
    ),
    of(
        "backends/native.py",
        "job.cancelled, extent.carried = 0, job",
        "extent.carried = job",
        "backends/test_cancelled.py",
    ),
    of(
        "native/io.c",
        "(chunk_t){job, NULL, 0, 0, ECANCELED, 1}",
        "(chunk_t){job, NULL, 0, 0, 0, 1}",
        "backends/test_cancelled.py",
    ),
    of(
        "backends/paged.py",
        "self.store.wait_written(number)  # `ended`",
        "pass  # `ended`",
        "backends/test_cancelled.py",
    ),
    of(
        "backends/traffic.py",
        "self._stats.lost += not given_up",
        "self._stats.lost += 1",
        "backends/test_cancelled.py",
    ),
)
