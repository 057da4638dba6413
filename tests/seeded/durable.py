"""Faults in durable runs; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
durable/test_store.py
- if batch.least < needed_below or
+ if

durable/test_folder.py
- os.rename(self._temporary, self._name, src
+ os.rename(self._temporary, self._name + '-', src

durable/test_run.py
- if newest is not None and newest.given != given:
+ if False:

interop/test_mpi_durable.py
-             if adjoint is not None and each.least < adjoint:
+             if False:

durable/test_folder.py
-         if found is None or found[0] != self.run:
-             return False
+         if found is None:
+             return False

durable/test_folder.py durable/test_store.py
-             if size != file_bytes:
+             if False:

interop/test_mpi_durable.py
-                 folder.unlink(each.name)  # a rank that was further goes back
+                 pass

durable/test_run.py durable/test_store.py
-         if checksum_of([record]) != self.checksums[place]:
+         if False:

durable/test_store.py
-         if entry[0].error:
+         if False:

durable/test_store.py
-             if step not in steps:
+             if False:

durable/test_run.py
-             require_state(costs, step, bytes_of(layout))
+             pass

durable/test_run.py
-             return now >= self._due_s and idle
+             return idle

durable/test_records.py
-         if unequal != (header.version == UNEQUAL):
+         if False:

planners/test_resumed.py
-                     action = Await(action.token + first)
+                     action = Await(action.token)

planners/test_resumed.py
-         room = room_bytes - sizes[start]
+         room = 2 * room_bytes
""")
