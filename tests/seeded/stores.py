"""Faults in stores; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
backends/test_lifetimes.py in backends/base.py
- self._hold.take()
-         try:
-             self._open(layout)
+ try:
+             self._open(layout)

backends/test_contract.py backends/test_streamed.py
- s->held[buffer]->buffer = -1;
+ ;

backends/test_contract.py backends/test_files.py
- r->taken + nbytes > r->most
+ r->taken > r->most

backends/test_contract.py
- if self._setup.verify and found != record.checksum:
+ if self._setup.verify and found == 0:

backends/test_native.py backends/test_contract.py
- && XXH3_64bits_digest(&lane->sum) != chunk->job->sum)
+ && !XXH3_64bits_digest(&lane->sum))

backends/test_streamed.py backends/test_contract.py
- .written = e->state == QUEUED ? &e->write : NULL,
+ .written = NULL,

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
- .sum = e->state == QUEUED ? 0 : e->write.sum};
+ .sum = 0};

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
- return above + below // together * together
+ return above + below + 1

backends/test_cascade.py
- movable = self._above if self._takes() else ()
+ movable = reversed(self._above) if self._takes() else ()

backends/test_cascade.py
- self._above.move_to_end(each, last=False)
+ self._above.move_to_end(each)

backends/test_striped.py
- written = written and made
+ written = made

backends/test_striped.py
- self._count(state.parts, -1)
+ pass

backends/test_cancelled.py
- ms_io_cancel(&e->write);
+ ;

backends/test_cancelled.py
- (chunk_t){job, NULL, 0, 0, ECANCELED, 1}
+ (chunk_t){job, NULL, 0, 0, 0, 1}

backends/test_cancelled.py
- s->view->lost += !(e->cancelled && e->state == FAILED);
+ s->view->lost++;
""")
