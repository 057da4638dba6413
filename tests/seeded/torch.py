"""Faults in the PyTorch front ends; see `mutants.py`."""

from __future__ import annotations

from seeded.mutant import Mutant, of

FAULTS: tuple[Mutant, ...] = (
    of(
        "torch/tiers/shuttle.py",
        "entry = self._order.popleft()",
        "entry = self._order.pop()",
        "torch/test_pinned.py",
    ),
    of(
        "torch/tiers/copies.py",
        "Entry(key, slot, written, sources)",
        "Entry(key, slot, written)",
        "torch/test_pinned.py",
    ),
    of(
        "torch/tiers/pinned_memory.py",
        "left -= nbytes",
        "left -= count * size",
        "torch/test_pinned.py",
    ),
    of(
        "torch/chains/away.py",
        "            sweep.lost.add(~step if is_tape else step)",
        "            sweep.lost.add(step)",
        "torch/test_tiers.py",
    ),
    of(
        "torch/environment/states.py",
        "new = leaf.detach().requires_grad_(wanted)\n                once[id(leaf)]",
        "new = leaf.detach().requires_grad_(wanted)\n                once[id(new)]",
        "torch/test_sequential.py",
    ),
    of(
        "torch/environment/captured.py",
        "                if tensor._version != version:\n                    self._refuse_written(tensor)",
        "                pass",
        "torch/test_environment.py",
    ),
    of(
        "torch/sequences/inputs.py",
        "return any(tensor._version != version for tensor, version in self._versions)",
        "return False",
        "torch/test_unroll.py",
    ),
    of(
        "torch/sequences/surroundings.py",
        "            copies = [value.clone() for value in rest]",
        "            copies = rest",
        "torch/test_cells.py",
    ),
    of(
        "torch/sequences/varied_time.py",
        "        most = self._costs.stages[step].tape_bytes\n        if nbytes > most:",
        "        most = self._costs.stages[step].tape_bytes\n        if False:",
        "torch/test_unequal_cells.py",
    ),
    of(
        "torch/sequences/kinds.py",
        "                    if self._exact and len(self.kinds) == MOST_KINDS:",
        "                    if False:",
        "torch/test_unequal_cells.py",
    ),
    of(
        "torch/tiers/parcels.py",
        "self.versions[number] = -1 if spoilt else tensor._version",
        "self.versions[number] = tensor._version",
        "torch/test_tiers.py",
    ),
    of(
        "torch/tiers/stowage.py",
        "    if not finished and not berth.runs and berth.opened is porter:",
        "    if False:",
        "torch/test_tiers.py",
    ),
    of(
        "torch/measurement/sizes.py",
        "        elif nbytes > self.output_bytes:",
        "        elif False:",
        "torch/test_sizes.py",
    ),
    of(
        "torch/measurement/comparing.py",
        "        if not (isinstance(inner, _Rounded) and inner.close(outer)):\n            return False",
        "        if not isinstance(inner, _Rounded):\n            return False",
        "torch/test_checking.py",
    ),
    of(
        "torch/tiers/shelf.py",
        "            if piece.waits:\n",
        "            if False:\n",
        "torch/test_offload.py",
    ),
    of(
        "torch/planning/choosing.py",
        "        input_bytes=costs.input_bytes + last.output_bytes,",
        "        input_bytes=costs.input_bytes,",
        "torch/test_sequential.py",
    ),
    of(
        "torch/tensors/checksums.py",
        "found = zlib.crc32(tensor.numpy().data, found)",
        "found = zlib.crc32(tensor.numpy().data)",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tensors/fingerprints.py",
        ".mul_(_FACTOR).bitwise_or_(1)",
        ".mul_(_FACTOR).mul_(2)",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tensors/geometry.py",
        "        if self.conj:\n",
        "        if False:\n",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tensors/geometry.py",
        "return torch._neg_view(tensor) if self.neg else tensor",
        "return tensor",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tensors/meter.py",
        "        self._live -= reference.nbytes",
        "        pass",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tensors/states.py",
        "            if tensor._version != version:\n                raise StateError",
        "            if False:\n                raise StateError",
        "torch/test_helpers.py",
    ),
    of(
        "torch/sequences/collector.py",
        "        whole[-1] = gradient",
        "        whole[0] = gradient",
        "torch/test_helpers.py",
    ),
    of(
        "torch/sequences/collector.py",
        "first = leaf if self._graph else leaf.clone()",
        "first = leaf",
        "torch/test_helpers.py",
    ),
    of(
        "torch/sequences/inputs.py",
        "            if len(places) > 1:",
        "            if False:",
        "torch/test_helpers.py",
    ),
    of(
        "torch/environment/snapshots.py",
        "            module._buffers[key] = buffer\n            undo_writes()",
        "            module._buffers[key] = buffer",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tiers/paging.py",
        "        page[at:].zero_()  # not what lay there before",
        "        pass",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tiers/paging.py",
        "                self._take_back(range(start, stop))\n                return None",
        "                return None",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tiers/porter.py",
        "                self.pager.drop(keys)\n\n    def _drop",
        "                pass\n\n    def _drop",
        "torch/test_helpers.py",
    ),
    of(
        "torch/tiers/porter.py",
        "trip.lines.clear()  # before anybody hears of it: their memory must be gone",
        "pass",
        "torch/test_helpers.py",
    ),
)
