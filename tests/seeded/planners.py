"""Faults in planners and their kernels; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of(
        "planners/single/store_all.py",
        "(n - 1) * costs.tape_slots",
        "(n - 2) * costs.tape_slots",
        "planners/test_planners.py",
    ),
    of(
        "planners/single/binomial.py",
        "return r * length - beta(slots + 1, r - 1)",
        "return r * length - beta(slots + 1, r)",
        "planners/test_binomial.py",
    ),
    of(
        "planners/single/revolve.py",
        "reverse_actions(0, n_steps, slots)",
        "reverse_actions(0, n_steps, max(1, slots - 1))",
        "planners/test_planners.py",
    ),
    of(
        "planners/single/revolve.py",
        "            yield Load(live)\n        elif kind in (kinds.firstrun",
        "            yield Load(saved[0])\n        elif kind in (kinds.firstrun",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/interval.py",
        "ahead[start - interval] = int(token)\n            free -= 1",
        "ahead[start - interval] = int(token)",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/interval.py",
        "if (yield Await(token)) is False:\n            lost.add(start)",
        "if (yield Await(token)) is None:\n            lost.add(start)",
        "execute/test_executor.py",
    ),
    of(
        "planners/single/periodic.py",
        "yield from taped_segment(start, start + length)",
        "yield from taped_segment(start, start + length - 1)",
        "planners/test_planners.py",
    ),
    of(
        "planners/single/recursive.py",
        "part = -(-(stop - start) // (branch + 1))",
        "part = (stop - start) // (branch + 1) or 1",
        "planners/test_planners.py",
    ),
    of(
        "planners/single/recursive.py",
        "free - k, branch, weight)",
        "free - k + 1, branch, weight)",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/online.py",
        "if self.levels[k] < highest:",
        "if self.levels[k] <= highest:",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/streaming.py",
        "(tier.read_s + step_s) / (step_s + turn_s)",
        "tier.read_s / (step_s + turn_s)",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/streaming.py",
        "if min(predicted.makespan_s, paper.makespan_s) >= fallback.makespan_s:",
        "if False:",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/sweep.py",
        "while len(self.writing) > self.sweep.queue_depth:",
        "while len(self.writing) > self.sweep.queue_depth + 1:",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/sweep.py",
        "        if (yield Await(token)) is False:\n            self.stored.discard(step)",
        "        if (yield Await(token)) is None:\n            self.stored.discard(step)",
        "execute/test_executor.py",
    ),
    of(
        "planners/streaming/reserve.py",
        "max(one_less[k], read_s)",
        "min(one_less[k], read_s)",
        "planners/test_planners.py",
    ),
    of(
        "planners/synchronous/hierarchy.py",
        "min(solved, key=lambda pair: pair[0].seconds)",
        "max(solved, key=lambda pair: pair[0].seconds)",
        "planners/test_hierarchy.py",
    ),
    of(
        "planners/synchronous/periodic_disk.py",
        "each = periods + transfers_in_steps",
        "each = periods + transfers_in_steps / 2",
        "planners/test_hierarchy.py",
    ),
    of(
        "planners/synchronous/stumm_walther.py",
        "order = np.argsort(priced",
        "order = np.argsort(-priced",
        "planners/test_hierarchy.py",
    ),
    of(
        "planners/synchronous/stumm_walther.py",
        "yield Drop(step)\n            return step",
        "pass\n            return step",
        "planners/test_hierarchy.py",
        "planners/test_planners.py",
    ),
    of(
        "planners/synchronous/mixed.py",
        "s // tape + 2",
        "s // tape + 3",
        "planners/test_hierarchy.py",
        "planners/test_planners.py",
    ),
    of(
        "planners/streaming/overlap.py",
        "staged = step not in held",
        "staged = False",
        "planners/test_overlap.py",
    ),
    of(
        "planners/streaming/resumed.py",
        "memory.stored.discard(step)\n            continue",
        "continue",
        "planners/test_resumed.py",
    ),
    of(
        "planners/chain/table.py",
        "stack.append((k, t, m - int(self.sizes.state[k])))",
        "stack.append((k, t, m))",
        "planners/test_heterogeneous.py",
    ),
    of(
        "planners/predict.py",
        "a + repeats * (a - b)",
        "a + (repeats - 1) * (a - b)",
        "planners/test_planners.py",
    ),
    of(
        "planners/bound.py",
        "cheapest - room * max(keep_1, read) - write_2",
        "cheapest - write_2",
        "planners/test_bound.py",
    ),
    of(
        "native/revolve.c",
        "return low + (high - low) / 2;",
        "return high + 1;",
        "planners/test_binomial.py",
    ),
    of(
        "native/chain_kernel.h",
        "const int shift = (int)(m - plane * PLANE);",
        "const int shift = (int)(m - plane * PLANE) & ~1;",
        "planners/test_heterogeneous.py",
    ),
    of(
        "native/hierarchy_kernel.h",
        "if (a[far] + b[stop - 1] >= least)",
        "if (a[far] + b[stop - 1] >= 0.99 * least)",
        "planners/test_hierarchy.py",
    ),
    of(
        "planners/chain/plan.py",
        "memory_bytes=limit, checked=False)",
        "checked=False)",
        "planners/test_chain_plan.py",
    ),
)
