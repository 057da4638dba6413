"""Faults in what judges, measures and runs schedules; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
test_actions.py
- elif step != machine.adjoint - 1:
+ elif step > machine.adjoint - 1:

schedule/test_simulation.py
- start = max(now, self.read_free, self.stored[item])
+ start = max(now, self.read_free)

schedule/test_simulation_of_stages.py
-             self.read_free = stop
+             pass

schedule/test_accounting.py
- if machine.pins and ~step in machine.pins:
+ if False:

schedule/test_accounting.py
- if self.pins[item] > 1:
+ if False:

schedule/test_accounting.py
- before = left + self.state[i + 1]
+ before = left

schedule/test_accounting.py
- if self.starts.get(step) is gone and step not in self.late:
+ if False:

execute/test_executor.py
- if other is not None and best < start < step:
+ if other is not None and best < start:

test_ownership.py
-             if not flags.owndata:
+             if False:

test_ownership.py
- return cast(State, made.copy())
+ return cast(State, made)

test_ownership.py
- return "shares memory with the state"
+ return ""

test_ownership.py
- adjoint = sweep.slots.adopt_adjoint(adjoint, sweep.live)
+ pass

test_fuzz_gradients.py
- if adjoint is None and self._wanted:
+ if False:

schedule/test_rules.py
- if machine.tapes and not machine.state_is_tape:
+ if False:

test_fuzz_gradients.py in model/blocks.py
- bool(getattr(chain, "one_tape", False))
+ False

reversing/test_given.py
- not self.plan.sealed
+ False

reversing/test_given.py
- if theirs.state_is_tape != costs.state_is_tape:
+ if False:

support/test_free_memory.py
- yield from inner.parents
+ pass

test_secrets.py
- functools.partial(_without_user, _USER), text
+ str, text
""")
