"""Faults in what judges, measures and runs schedules; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of(
        "schedule/machine.py",
        "elif step != machine.adjoint - 1:",
        "elif step > machine.adjoint - 1:",
        "test_actions.py",
    ),
    of(
        "schedule/virtual_time.py",
        "start = max(now, self.read_free, self.stored[item])",
        "start = max(now, self.read_free)",
        "schedule/test_simulation.py",
    ),
    of(
        "schedule/virtual_time.py",
        "            self.read_free = stop",
        "            pass",
        "schedule/test_simulation_of_stages.py",
    ),
    of(
        "schedule/machine.py",
        "if machine.pins and ~step in machine.pins:",
        "if False:",
        "schedule/test_accounting.py",
    ),
    of(
        "schedule/machine.py",
        "if machine.pins[item] > 1:",
        "if False:",
        "schedule/test_accounting.py",
    ),
    of(
        "schedule/machine_state.py",
        "before = left + self.state[i + 1]",
        "before = left",
        "schedule/test_accounting.py",
    ),
    of(
        "schedule/machine_state.py",
        "if self.starts.get(step) is gone and step not in self.late:",
        "if False:",
        "schedule/test_accounting.py",
    ),
    of(
        "execute/recovery.py",
        "if other is not None and best < start < step:",
        "if other is not None and best < start:",
        "execute/test_executor.py",
    ),
    of(
        "states/references.py",
        "            if not flags.owndata:",
        "            if False:",
        "test_ownership.py",
    ),
    of(
        "states/references.py",
        "return made.copy()\n    return made.state",
        "return made\n    return made.state",
        "test_ownership.py",
    ),
    of(
        "states/sharing.py",
        'return "shares memory with the state"',
        'return ""',
        "test_ownership.py",
    ),
    of(
        "execute/executor.py",
        "adjoint = sweep.slots.adopt_adjoint(adjoint, sweep.live)",
        "pass",
        "test_ownership.py",
    ),
    of("execute/loop.py", "if adjoint is None and sweep.wanted:", "if False:", "test_ownership.py"),
    of(
        "schedule/machine.py",
        "if machine.tapes and not machine.state_is_tape:",
        "if False:",
        "schedule/test_rules.py",
    ),
    of("model/blocks.py", 'bool(getattr(chain, "one_tape", False))', "False", "test_ownership.py"),
    of("reversing/uniform.py", "not self.plan.sealed", "False", "measurement/test_given.py"),
    of(
        "measurement/given.py",
        "if theirs.state_is_tape != costs.state_is_tape:",
        "if False:",
        "measurement/test_given.py",
    ),
    of("support/free_memory.py", "yield from inner.parents", "pass", "support/test_free_memory.py"),
    of(
        "errors.py", "functools.partial(_without_user, _USER), text", "str, text", "test_secrets.py"
    ),
)
