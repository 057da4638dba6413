"""Faults in the PyTorch front ends; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import faults

FAULTS = faults("""
torch/test_pinned.py
- State(key, next(self._numbers), nbytes)
+ State(key, key, nbytes)

torch/test_pinned.py
- slot, places, written, sources)
+ slot, places, written, [])

torch/test_pinned.py in torch/tiers/pinned.py
- left -= nbytes
+ left -= count * size

torch/test_tiers.py
-             sweep.lost.add(~step if is_tape else step)
+             sweep.lost.add(step)

torch/test_environment.py
- new = leaf.detach().requires_grad_(wanted)
-                 once[id(leaf)]
+ new = leaf.detach().requires_grad_(wanted)
+                 once[id(new)]

torch/test_environment.py
- what = self.found.name_of(tensor)
+ continue

torch/test_unroll.py
- return any(tensor._version != version for tensor, version in self._versions)
+ return False

torch/test_cells.py
-             copies = [copied(value) for value in rest]
+             copies = rest

torch/test_unequal_cells.py
-         most = self._known.stages[step].tape_bytes
-         if nbytes > most:
+         most = self._known.stages[step].tape_bytes
+         if False:

torch/test_unequal_cells.py
-         if self._exact and not self.equal and len(self._kinds) == MOST_KINDS:
+         if False:

torch/test_tiers.py
- self.versions[number] = -1 if watch.spoilt else tensor._version
+ self.versions[number] = tensor._version

torch/test_tiers.py
-     if not finished and not tier.runs and tier.opened is lane:
+     if False:

torch/test_sizes.py
-         elif nbytes > self.output_bytes:
+         elif False:

torch/test_checking.py
-         if not (isinstance(inner, _Rounded) and inner.close(outer)):
-             return False
+         if not isinstance(inner, _Rounded):
+             return False

torch/test_offload.py
-             if watch.spoilt:
-                 raise written_to()
+             if False:
+                 raise written_to()

torch/test_sequential.py
-         input_bytes=costs.input_bytes + last.output_bytes,
+         input_bytes=costs.input_bytes,

torch/test_helpers.py
- found.append(digest(_in_order
+ found[:] = array("Q"); found.append(digest(_in_order

torch/test_helpers.py
- .mul_(_FACTOR).bitwise_or_(1)
+ .mul_(_FACTOR).mul_(2)

torch/test_offload_exact.py torch/test_offload.py in torch/tensors/geometry.py
-         if self.conj:
-
+         if False:
+

torch/test_offload_exact.py torch/test_offload.py in torch/tensors/geometry.py
- return torch._neg_view(tensor) if self.neg else tensor
+ return tensor

torch/test_profiling.py
- _freed(self, reference: _Reference) -> None:
-         self._live -= reference.nbytes
+ _freed(self, reference: _Reference) -> None:
+         pass

torch/test_unroll.py torch/test_cells.py
-             if isinstance(part, Tensor) and part._version != version:
-                 raise StateError
+             if False:
+                 raise StateError

torch/test_helpers.py
-         whole[-1] = gradient
+         whole[0] = gradient

torch/test_cell_results.py
- first = part if self._graph else copied(part)
+ first = part

torch/test_cells.py torch/test_unroll.py
-             if len(places) > 1:
+             if False:

torch/test_review.py
-                 put_back(tensor, value, version)
+                 pass

torch/test_helpers.py
-                 self._take_back(range(start, stop))
-                 return None
+                 return None

torch/test_helpers.py
-             self._pager.drop(keys)
-
-     def _drop
+             pass
+
+     def _drop

torch/test_helpers.py
- self.lines.clear()  # before `done` is set: their memory must be gone
+ pass

torch/test_tiers.py
-             kept.state.verify()
+             pass

torch/test_late_tiers.py
-             holdings.leaving = set()  # nothing leaves any more
+             pass

torch/test_tiers.py
-         if tape.is_input(number) and (state := self._holdings.at_hand(i)) is not None:
-             state.verify()
-

torch/test_review.py
-             around.let_graphs_go()
+             pass

torch/test_sequential.py
- if stops and not self._are_alike(first, caught.kinds):
+ if False:

torch/test_repeated_runs.py
-         pairs = [(number, now, first[number]) for number, now in sums]
+         pairs = []

torch/test_tiers.py
- if best[1].writes and best[1].makespan_s <= PAYS * plan.makespan_s:
+ if best[1].writes:

torch/test_cell_weights.py torch/test_environment.py
-                     self.owner.clear()  # the order counts, of parameters above all
+                     pass

torch/test_environment.py torch/test_hidden_state.py
-         if tensor.requires_grad and storages[tensor.untyped_storage()._cdata] > 1:
+         if False:

torch/test_helpers.py
-             cost.stage.backward_overhead_bytes + above + below + others[cost.parameters]
+             cost.stage.backward_overhead_bytes + above + below

torch/test_helpers.py
-         if any(f is not o.filler for f, o in zip(fillers, memory, strict=True)):
-             return False
-

torch/test_tiers.py
-             for transfer in (sent.transfer, *sent.group.fillers()):
+             for transfer in (sent.transfer,):

torch/test_compiling.py
-         finally:  # whatever ends it, such as the last tensor that it was run again for
-             opened.close()
+         finally:
+             pass

torch/test_helpers.py
-     return any(w is not None and order.get(w, len(order)) > number for w in writers)
+     return False
""")
