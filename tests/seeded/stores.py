"""Faults in stores; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
backends/test_lifetimes.py in backends/streamed.py
- self._hold.take()
-         try:
-             self._open(layout)
+ try:
+             self._open(layout)

backends/test_contract.py backends/test_streamed.py
- before.buffer = None
+ pass

backends/test_contract.py backends/test_files.py
- self._taken + nbytes <= self.most_bytes
+ self._taken <= self.most_bytes

backends/test_files.py backends/test_contract.py
- if self._verify and found != flight.checksum:
+ if self._verify and found == 0:

backends/test_streamed.py backends/test_contract.py
- if flight.behind is not None:
+ if False:

backends/test_arena.py backends/test_contract.py
- self._lent[number] = weakref.ref(buffer, back)
+ back(weakref.ref(buffer))

backends/test_contract.py
- self._extents[slot][offset : offset + len(data)], data)
+ self._extents[slot][: len(data)], data)

backends/test_contract.py
- view, offset = view[len(part) :], 0
+ view, offset = view[len(part) :], PAGE

backends/test_contract.py
- data += nbytes, left -= nbytes, offset = 0;
+ data += nbytes, left -= nbytes;

backends/test_contract.py
- self._run(self._write_at(self.fd, view, position))
+ self._run(self._write_at(self.fd, view, 0))

backends/test_contract.py
- sum=extent.checksum,
+ sum=0,

backends/test_native.py
- job->error = error;
+ job->error = 0;

backends/test_native.py
- done -= done % PAGE;
+ ;

backends/test_numa.py
- if self._node not in there:
+ if False:

backends/test_remote.py
- for job in jobs:
-                         job.result()
-
+ pass
+

backends/test_compressed.py
- if not error <= self._tolerance:
+ if error > 10 * self._tolerance:

backends/test_contract.py
- self.capacity_bytes = upper + lower
+ self.capacity_bytes = upper

backends/test_cascade.py
-         if place.moving:
-             return None
-         if place.above < 0 and place.below < 0:
+         if place.above < 0 and place.below < 0:

backends/test_cascade.py
- self._above.move_to_end(place, last=False)
+ self._above.move_to_end(place)

backends/test_cancelled.py
- if extent.cancelled:
-                 raise
+ if False:
+                 raise

backends/test_cancelled.py
- job.cancelled, extent.carried = 0, job
+ extent.carried = job

backends/test_cancelled.py
- (chunk_t){job, NULL, 0, 0, ECANCELED, 1}
+ (chunk_t){job, NULL, 0, 0, 0, 1}

backends/test_cancelled.py
- self._stats.lost += not given_up
+ self._stats.lost += 1
""")
