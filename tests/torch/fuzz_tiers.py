"""Random chains under random plans with a slow tier, with faults, against plain training.

    python tests/torch/fuzz_tiers.py --seconds 170 --seed 0
    python tests/torch/fuzz_tiers.py --case 12345

A case follows from one integer: the stages, the plan, the store and what fails in it, how
fast the tier is beside computing, whether it is said to be late, so
that runs go on without it, and what is done with the graph.  Outputs, gradients,
buffers and the random state must be those of plain training bit for bit, or an error says
why not.  Memory that awaits bytes from the tier is filled with NaN, so that whoever uses
it too early is found.  The exit status is 1 if anything else was found.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tierfuzz.chains import WIDTH, Spoil, Spoils, random_chain
from tierfuzz.faults import Flaky, FlakyFile, Interrupts, Pace, poisoned
from tierfuzz.late import as_planned, course
from tierfuzz.plans import random_plan

from leaving import by_chance, said_late  # isort: skip
from torch import Tensor, nn

from multistage.actions import Action
from multistage.planners import Plan
from multistage.torch.chains.runner import Run
from multistage.torch.environment.captured import Snapshot
from multistage.torch.environment.scope import Scope
from multistage.torch.measurement.exploring import explore
from multistage.torch.tiers.lane import ChainTier

CPU = torch.device("cpu")
PAGE = 4096
INPLACE = "modified by an inplace operation"


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Stop(Exception):
    """Of a hook of the user's."""


WAYS = ("once", "twice", "partial", "hook", "interrupt", "two", "two back", "same", "again")


def train(
    way: str,
    rng: random.Random,
    models: list[nn.Sequential],
    calls: list[Callable[[Tensor], Tensor]],
    interrupts: Interrupts | None,
    between: Callable[[], None],
) -> list[Tensor]:
    """Return what training gives; `interrupts` is None where the faults are to be left out."""
    torch.manual_seed(1)
    x = torch.randn(8, WIDTH, requires_grad=True)
    parameters = [p for model in models for p in model.parameters()]
    found: list[Tensor] = []

    def forget() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    def backward(loss: Tensor, **given: Any) -> None:
        """Until it comes through, from the same gradients."""
        while True:
            before = [None if t.grad is None else t.grad.clone() for t in (x, *parameters)]
            try:
                if interrupts is not None:
                    interrupts.on = way == "interrupt"
                loss.backward(retain_graph=True, **given)
                return
            except (KeyboardInterrupt, Stop):
                for t, grad in zip((x, *parameters), before, strict=True):
                    t.grad = grad
            finally:
                if interrupts is not None:
                    interrupts.on = False

    victim = rng.randrange(len(parameters))
    own = [*models[0].parameters()]
    some = rng.sample(own, min(3, len(own)))
    ys = [call(x) for call in calls]
    losses = [y.square().sum() for y in ys]
    between()
    if way in ("once", "interrupt"):
        backward(losses[0])
    elif way == "twice":
        backward(losses[0])
        backward(losses[0])
    elif way == "partial":
        found += torch.autograd.grad(losses[0], some, retain_graph=True)
        found += torch.autograd.grad(losses[0], [x], retain_graph=True)
        backward(losses[0])
    elif way == "hook":
        if interrupts is not None:
            left = [1]

            def stop(_: Tensor) -> None:
                if left:
                    left.clear()
                    raise Stop

            handle = parameters[victim].register_hook(stop)
        backward(losses[0])
        if interrupts is not None:
            handle.remove()
    elif way == "two back":
        for loss in reversed(losses):
            backward(loss)
    elif way == "same":
        backward(losses[0] + losses[1])
    elif way == "again":
        found += torch.autograd.grad(losses[0], some, retain_graph=True)
        backward(losses[1])
        backward(losses[0])
    else:
        for loss in losses:
            backward(loss)
    found += [*ys, x.grad, *[p.grad for p in parameters if p.grad is not None]]
    found += [b for model in models for b in model.buffers()]
    return [t.detach().clone() for t in found] + [torch.get_rng_state()]


def bound(
    model: nn.Sequential, actions: list[Action], slow: ChainTier, plan: Plan | None = None
) -> Callable[[Tensor], Tensor] | None:
    """Return the chain under a plan; None where its stages do not go alone.

    Given as a `Plan` too, its tier is left where it is late.
    """
    x = torch.randn(8, WIDTH, requires_grad=True)
    with Snapshot(Scope(list(model)), [x]):
        groups, traits = explore(list(model), [str(k) for k in range(len(model))], x)
    if any(len(group) != 1 for group in groups):
        return None

    def call(x: Tensor) -> Tensor:
        asked = None if plan is None else course(plan)
        return Run(list(model), traits, actions, slow, course=asked).forward(x)

    return call


def play(seed: int) -> tuple[str, bool]:
    """Run a case; return what it is, and whether it gave what plain training does."""
    rng = random.Random(seed)
    way = rng.choice(WAYS)
    what = rng.choice(["none", "none", "full", "write", "read", "break", "close", "small"])
    kind = rng.choice(["memory", "file"])
    pace = rng.choice(["free", "eager", "lazy", "mixed"])
    late = rng.choice([0.0, 0.0, 0.3, 1.0])
    count = 2 if way in ("two", "two back", "same", "again") else 1
    odds, until = rng.choice([0.05, 0.2, 0.5, 1.0]), rng.choice([10, 40, 10**9])
    asked = 0

    def when(key: int) -> bool:
        nonlocal asked
        asked += 1
        return asked < until and random.Random(seed * 31 + key).random() < odds

    name = f"{way}, {kind} {what}, {pace}" + (", late" if late else "")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        capacity = PAGE * rng.randrange(1, 30) if what == "small" else None
        store: Any
        if kind == "file":
            store = FlakyFile(folder, buffer_bytes=0, capacity_bytes=capacity).fail(what, when)
        else:
            store = Flaky(what, when)
            store.capacity_bytes = capacity
        slow = ChainTier(store, CPU, PAGE)
        stack.callback(slow.close)
        plain = [random_chain(seed + k) for k in range(count)]
        ours = [random_chain(seed + k) for k in range(count)]
        if count == 2 and rng.random() < 0.4:  # two runs of one chain
            plain[1], ours[1] = plain[0], ours[0]
        calls: list[Any] = []
        for model in ours:
            actions = random_plan(rng, len(model))
            plan = as_planned(rng, actions, len(model)) if late else None
            call = bound(model, actions, slow, plan)
            if call is None:
                return "grouped", True
            calls.append(call)
        draw = rng.random()
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        refused = False
        Spoil.on = True
        try:
            expected = train(way, random.Random(draw), plain, list(plain), None, nothing)
        except RuntimeError as error:
            # Autograd finds out who wrote to what it saved: so may we, or have saved bytes of it.
            assert INPLACE in str(error)
            refused, Spoil.on = True, False
            plain = [random_chain(seed + ours.index(model)) for model in ours]
            if count == 2 and ours[0] is ours[1]:
                plain[1] = plain[0]
            expected = train(way, random.Random(draw), plain, list(plain), None, nothing)
            Spoil.on = True
        interrupts = Interrupts.by_chance(rng, rng.randrange(1, 4))
        if late:
            stack.enter_context(said_late(by_chance(rng, late)))
        for context in (poisoned(), Pace(rng, pace).kept(), interrupts.strike()):
            stack.enter_context(context)
        close = slow.close if what == "close" else nothing
        spoils = any(isinstance(stage, Spoils) for model in ours for stage in model)
        try:
            found = train(way, random.Random(draw), ours, calls, interrupts, close)
        except RuntimeError as error:
            if not spoils or INPLACE not in str(error):
                raise
            return ("refused" if refused else "refused by us only") + ", " + name, True
    return name, same(found, expected)


def run(seconds: float, seed: int, count: int | None = None) -> tuple[Counter[str], list[str]]:
    """Run cases from a seed on; return counts, and what was found."""
    began, number = time.monotonic(), 0
    counts: Counter[str] = Counter()
    found: list[str] = []
    with warnings.catch_warnings():
        while time.monotonic() - began < seconds and number != count:
            case = seed + number
            number += 1
            try:
                name, right = play(case)
                counts[name.partition(",")[0]] += 1
                if not right:
                    found.append(f"case {case} differs: {name}")
                    print(found[-1], flush=True)
            except Exception:
                found.append(f"case {case} raised {traceback.format_exc(limit=-3)}")
                print(found[-1], flush=True)
            if number % 50 == 0:
                gc.collect()
    return counts, found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--case", type=int, help="run one case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case is not None:
        name, right = play(given.case)
        print(name, "equal" if right else "DIFFERS")
        return not right
    counts, found = run(given.seconds, given.seed, given.count)
    for name, number in counts.most_common():
        print(f"{number:6} {name}")
    print(f"{sum(counts.values())} cases, {len(found)} findings")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
