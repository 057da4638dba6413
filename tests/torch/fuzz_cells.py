"""Random sequences of steps that differ, by `unroll` and by plain training.

    python tests/torch/fuzz_cells.py --count 500 --seed 0

States, outputs, gradients, buffers and generators must be the same bits, or the
sequence is refused.  Prints what differs, and counts.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import multistage.torch as mst
from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import BudgetError, CheckpointWarning, MultistageError


class Step(nn.Module):
    """A step that maps a tree of two leaves, of widths `before`, to one of widths `after`."""

    def __init__(self, chance: random.Random, before: list[int], after: list[int]) -> None:
        super().__init__()
        kinds = [
            "plain",
            "noise",
            "norm",
            "passes",
            "in place",
            "gated",
            "hooks",
            "columns",
            "gaps",
        ]
        self.kind = chance.choice(kinds)
        self.speaks = chance.random() < 0.6
        self.first = nn.Linear(before[0], after[0])
        self.second = nn.Linear(before[1], after[1])
        self.of_x = nn.Linear(3, after[0])
        self.norm = nn.BatchNorm1d(after[0])
        self.same = before[1] == after[1]

    def forward(self, state: dict[str, Tensor], x: Tensor | None) -> Any:
        if self.kind == "hooks" and state["h"].requires_grad:
            state["h"].register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        h, c = self.first(state["h"] + state["h"].mean(1, keepdim=True)), state["c"]
        if x is not None:
            h = h + self.of_x(x).mean(0)
        match self.kind:
            case "noise":
                h = nn.functional.dropout(h, 0.3) + 0.1 * torch.rand_like(h) * random.random()
            case "norm":
                h = self.norm(h)
            case "in place":
                h = h.mul_(1.5).tanh_()
            case "gated":
                h = torch.tanh(h) * torch.sigmoid(h)
        # Some hand the same tensor on: then it lies in several states.
        c = c if self.kind == "passes" and self.same else torch.tanh(self.second(c)) + h.mean()
        h = torch.tanh(h)
        if self.kind == "columns":
            h = torch.cat([h, h], 1)[:, h.shape[1] :]
        elif self.kind == "gaps":
            h = torch.stack([h, h], -1)[..., 0]
        after = {"h": h, "c": c}
        if not self.speaks:
            return after
        return after, {"loss": h.square().mean(), "sum": after["h"].sum(1, keepdim=True)}


def program(seed: int) -> tuple[list[Step], dict[str, Tensor], list[Tensor | None]]:
    """Return the cells, state 0 and the inputs of a random sequence."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    period = chance.randint(1, 5)
    widths = [[chance.choice([2, 5, 12]) for _ in range(2)] for _ in range(period)]
    loop = [Step(chance, widths[k], widths[(k + 1) % period]) for k in range(period)]
    steps = period * chance.randint(1, 6)
    batch, wants = chance.randint(2, 6), chance.random() < 0.7
    state = {
        "h": torch.randn(batch, widths[0][0], requires_grad=wants),
        "c": torch.randn(batch, widths[0][1], requires_grad=wants),
    }
    lengths = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    shared = torch.randn(2, batch, 3, requires_grad=True)
    inputs: list[Tensor | None] = []
    for _ in range(steps):
        draw = chance.random()
        if draw < 0.2:
            inputs.append(None)
        elif draw < 0.3:
            inputs.append(shared)
        else:
            size = chance.choice(lengths), batch, 3
            inputs.append(torch.randn(size, requires_grad=chance.random() < 0.6))
    return [loop[t % period] for t in range(steps)], state, inputs


def left_by(seed: int, options: dict[str, Any] | None, mode: Any) -> tuple[list[Any], str]:
    """Return all that a run leaves, and the planner; plainly without options."""
    cells, state, inputs = program(seed)
    torch.manual_seed(seed)
    random.seed(seed)
    planner = "plain"
    if options is None:
        last: Any = state
        ys: list[dict[str, Tensor]] = []
        for cell, x in zip(cells, inputs, strict=True):
            result = cell(last, x)
            last = result[0] if cell.speaks else result
            ys += [result[1]] if cell.speaks else []
        loss = None
        sums = [y["sum"] for y in ys]
        for y in ys:
            loss = y["loss"] if loss is None else loss + y["loss"]
        outputs: Any = {}
        if sums:
            total = sums[0]
            for each in sums[1:]:
                total = total + each
            reduced = {"stack": lambda: torch.stack(sums), "last": lambda: sums[-1]}
            outputs = {"loss": loss, "sum": reduced.get(mode, lambda: total)()}
    else:
        out = mst.unroll(cells, state, inputs, outputs=mode, **options)
        last, outputs = out.state, {} if out.outputs is None else out.outputs
        planner = "none" if out.plan is None else out.plan.planner
    leaves = [*pytree.tree_leaves(last), *pytree.tree_leaves(outputs)]
    torch.stack([(t * t).sum() for t in leaves if t.requires_grad]).sum().backward()
    modules = list(dict.fromkeys(cells))
    given = [*state.values(), *(x for x in inputs if x is not None)]
    left = [
        *leaves,
        *(t.grad for t in given if t.requires_grad),
        *(p.grad for m in modules for p in m.parameters()),
        *(b for m in modules for b in m.buffers()),
        torch.rand(2),
        torch.tensor(random.random()),
    ]
    return left, planner


def judged(seed: int) -> str:
    """Run one program both ways; return "equal ...", "refused ..." or "DIFFERENT ..."."""
    chance = random.Random(-seed - 1)
    mode = chance.choice(["stack", "sum", "last"])
    options: dict[str, Any] = {"memory": chance.choice([1.0, 0.9, 0.7, "200 KiB"])}
    if chance.random() < 0.5:
        options["chunk"] = chance.randint(1, 3)
    if options["memory"] == "200 KiB":
        options["planner"] = chance.choice(["recompute", "stream"])
        if options["planner"] == "stream":
            lost = chance.randint(0, 4)
            name = chance.choice(["lose_read", "lose_write", "refuse"])
            store = FaultyStore(
                MemoryStore(buffer_bytes=4096), **{name: lambda number: number % 5 == lost}
            )
            options |= {"tiers": [store], "chunk": 1, "check": "off"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        try:
            mine, planner = left_by(seed, options, mode)
        except BudgetError:
            return "refused: memory"
        except MultistageError as error:
            return f"refused: {str(error)[:90]}"
    theirs, _ = left_by(seed, None, mode)
    same = len(mine) == len(theirs) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(mine, theirs, strict=True)
    )
    return f"equal: {planner}" if same else f"DIFFERENT: seed {seed} {mode} {options}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        outcome = judged(seed)
        if outcome.startswith("DIFFERENT"):
            print(outcome)
            outcome = "DIFFERENT"
        found[outcome] += 1
    for outcome, count in found.most_common():
        print(f"{count:6d} {outcome}")


if __name__ == "__main__":
    main()
