"""Faults in planners and their kernels; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
planners/test_planners.py
- (n_steps - 1) * costs.tape_slots
+ (n_steps - 2) * costs.tape_slots

planners/test_binomial.py
- return r * length - beta(slots + 1, r - 1)
+ return r * length - beta(slots + 1, r)

planners/test_planners.py
- reverse_actions(0, n_steps, slots)
+ reverse_actions(0, n_steps, max(1, slots - 1))

planners/test_planners.py
-             yield Load(live)
-         elif kind in (kinds.firstrun
+             yield Load(saved[0])
+         elif kind in (kinds.firstrun

planners/test_planners.py
- ahead[start - interval] = int(token)
-             free -= 1
+ ahead[start - interval] = int(token)

execute/test_executor.py
- if (yield Await(token)) is False:
-             lost.add(start)
+ if (yield Await(token)) is None:
+             lost.add(start)

planners/test_planners.py
- yield from taped_segment(start, start + length)
+ yield from taped_segment(start, start + length - 1)

planners/test_planners.py
- part = -(-(stop - start) // (branch + 1))
+ part = (stop - start) // (branch + 1) or 1

planners/test_planners.py
- free - k, branch, weight)
+ free - k + 1, branch, weight)

planners/test_planners.py
- if self.levels[k] < highest:
+ if self.levels[k] <= highest:

planners/test_corpus.py
- (tier.read_s + step_s) / (step_s + turn_s)
+ tier.read_s / (step_s + turn_s)

planners/test_planners.py
- if min(predicted.makespan_s, paper.makespan_s) >= fallback.use.makespan_s:
+ if False:

planners/test_planners.py
- while len(self.writing) > self.sweep.queue_depth:
+ while len(self.writing) > self.sweep.queue_depth + 1:

execute/test_executor.py
-         if (yield Await(token)) is False:
-             if staged
+         if (yield Await(token)) is None:
+             if staged

planners/test_planners.py
- max(one_less[k], read_s)
+ min(one_less[k], read_s)

planners/test_hierarchy.py
- min(solved, key=lambda pair: pair[0].seconds)
+ max(solved, key=lambda pair: pair[0].seconds)

planners/test_hierarchy.py
- each = periods + transfers_in_steps
+ each = periods + transfers_in_steps / 2

planners/test_hierarchy.py
- order = np.argsort(priced
+ order = np.argsort(-priced

planners/test_hierarchy.py planners/test_planners.py
- yield Drop(live)
+ pass

planners/test_hierarchy.py planners/test_planners.py
- s // tape + 2
+ s // tape + 3

planners/test_overlap.py
- rules.used, max(rules.used, rules.peak)
+ rules.used - 1, max(rules.used, rules.peak) - 1

planners/test_resumed.py
- if landed is False:
+ if landed is None:

planners/test_heterogeneous.py
- stack.append((k, t, m - int(self.sizes.state[k])))
+ stack.append((k, t, m))

planners/test_planners.py
- a + repeats * (a - b)
+ a + (repeats - 1) * (a - b)

planners/test_binomial.py
- return low + (high - low) / 2;
+ return high + 1;

planners/test_heterogeneous.py in native/chain_kernel.h
- const int shift = (int)(m - plane * PLANE);
+ const int shift = (int)(m - plane * PLANE) & ~1;

planners/test_hierarchy.py
- if (a[far] + b[stop - 1] >= least)
+ if (a[far] + b[stop - 1] >= 0.99 * least)

planners/test_plans.py
- memory_bytes=limit, checked=False)
+ checked=False)

planners/test_golden.py planners/test_joint.py planners/test_joint_bound.py oracles/test_joint_exact.py
-         if (w)
-             take_min(z, out, 0, least(z, f, s, w - 1)
+         if (0)
+             take_min(z, out, 0, least(z, f, s, w - 1)

planners/test_golden.py planners/test_joint.py planners/test_joint_bound.py oracles/test_joint_exact.py
- take_min(z, out, 0, least(z, 0, s, w), z->state[s], 0);
+ take_min(z, out, 0, least(z, 0, s, w), 0, 0);

planners/test_corpus.py
- least(z, 1, s + 1, queued), 0, price);
+ least(z, 1, s + 1, queued), 0, 0);

planners/test_corpus.py
- now += x->read_overhead_s;
+ (void)x->read_overhead_s;

planners/test_golden.py planners/test_joint.py planners/test_joint_bound.py oracles/test_joint_exact.py
- *writing = (now > *writing ? now : *writing) + w->item[put].write_s;
+ *writing = now + w->item[put].write_s;

planners/test_golden.py planners/test_joint.py planners/test_joint_bound.py oracles/test_joint_exact.py
- w->item[gone].bytes - (q < turn ? w->item[gone].again : 0);
+ w->item[gone].bytes;

planners/test_joint_kernels.py
- w.other[cut - 1] = first[cut - 1];
+ w.other[cut - 1] = rest[cut - 1];

planners/test_golden.py planners/test_joint.py planners/test_joint_bound.py oracles/test_joint_exact.py
- behind[m - state] + late;
+ behind[m - state];

planners/test_joint_kernels.py
- max64(lands, run + input(z, f, s) + queued)
+ lands

planners/test_pieces.py
- self._none[s, :count] = part._none[cells]
+ self._none[s, :count] = 0

interop/test_mpi_unequal.py
- return max(-(-value * room // own) for value, own in zip(values, rooms, strict=True))
+ return next(iter(values))

planners/test_joint_kernels.py
- if (!(found <= now || found - now < allowed * luck * luck))
+ if (!(found <= now))
""")
