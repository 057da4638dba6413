"""Schedules of checkpoint_schedules run here, and plans of ours as schedules of theirs.

Theirs to ours: `as_planner(make)` turns a schedule of that package into a
planner for `Reversal`.  It is judged action by action before a step runs;
then its transfers, which it waits for, run beside the steps as far as the
budget leaves slots for them.

Ours to theirs: `as_schedule(plan)` is a `CheckpointSchedule` for any driver that takes
one, such as pyadjoint's `tape.enable_checkpointing`.

Both ways "RAM" are the fast slots and "disk" is the first slow tier.
"""

from .ours import as_schedule as as_schedule
from .theirs import actions_of as actions_of
from .theirs import as_planner as as_planner
