"""Faults in MPI, pyrevolve and checkpoint_schedules; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
interop/test_agreed.py
-         if arrays is not None and lost < 0:
+         if arrays is not None:

interop/test_mpi_reversal.py
-                 if value != found[0][name]:
+                 if False:

interop/test_mpi_reversal.py
-             if other != found[0][0]:
+             if False:

interop/test_checkpoint_schedules.py
-         seen.kept[index] = True
+         seen.kept[index] = False

interop/test_checkpoint_schedules.py
-                     self._r += action.n1 - action.n0
+                     self._r += 1

interop/test_agreed.py
-                 self._missing.add(key)
-                 self._full = True
+                 self._missing.add(key)

interop/test_agreed.py
-         self._missing.discard(key)
+         pass

interop/test_pyrevolve.py
-             memory = Budget(slots=TRANSIT if diskstorage else n_checkpoints)
+             memory = Budget(slots=n_checkpoints)

interop/test_pyrevolve.py
-             levels = (Level(1), *levels)
+             pass

interop/test_mpi_unequal.py
-             self._opened.open(stores, largest_of(self.costs))  # a plan of ranks has other bytes
+             self._opened.open(stores, largest_of(self.plan.stage_costs))

interop/test_mpi_unequal.py
-             if self.most(start.peak_bytes(actions, own) - limit) <= 0:
+             if True:
""")
