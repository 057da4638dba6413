"""10 000 ranks on one shared store: plans that count on a fair part of it, and plans that do not.

Every rank reverses a computation of its own, all alike, and writes its checkpoints to one store.
*Uncoordinated*, each plans with the rates that it measured alone; *coordinated*, with the part that
is left to it while all use the store (`share=`, or ranks that measure at once).  The store divides
its bandwidth evenly among the transfers in flight, each way by itself, and serves one transfer of a
rank each way at a time; all of it runs in virtual time, plans as they are: no rank leaves a tier
that is late.

Ranks with one plan that start together are alike at any time, so one of them stands for all
(`Group`); `tests/test_shared_store.py` compares groups with as many single ranks, and one rank with
`multistage.simulate`.  `N` ranks whose transfers the store serves at `1 / crowding` of the rate of
one alone, `N / crowding` being those that it serves without loss.

`coordinated_gain`
    makespan uncoordinated over coordinated: 10 000 steps, 20 slots, a transfer alone as long as a
    step, and 128 times as long while all 10 000 ranks write
`gain_median`, `gain_least`, `gain_most`
    the same over numbers of steps and slots and crowding, where the store is the bottleneck
    (coordinated plans are slower than those of ranks alone) and of use (plans without it take
    a fifth longer)
`staggered_gain`
    seconds of a computation by the coordinated plans over those in four groups that start a quarter
    of a makespan apart, the median: where each rank reverses one computation after the other,
    only one group writes at a time, and plans count on four times the rate of writing
`plan_s`
    seconds to plan for all ranks, the most over the cases

    python -m benchmarks.shared_store [--quick] [--json FILE]
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from benchmarks._common import finish, options
from multistage import Costs, plan
from multistage.actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    Evict,
    Get,
    Offer,
    Put,
    Reverse,
    Tape,
    drive,
)
from multistage.model.tier import Tier
from multistage.planners import Plan

Kind: TypeAlias = Literal["write", "read"]
KINDS: tuple[Kind, Kind] = ("write", "read")
RANKS, GROUPS = 10_000, 4
CASE = 10_000, 20, 1.0, 128.0  # steps, slots, seconds of a transfer alone, crowding


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer of one state: what is left of it, in states, and whether it may begin.

    Attributes
    ----------
    after : Transfer or None
        The write that it reads back.
    """

    left: float = 1.0
    after: Transfer | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.left <= 0.0


@dataclass(eq=False, slots=True)
class Group:
    """Ranks with one plan that start together, of which one is run.

    Attributes
    ----------
    plan : Plan
        Of uniform steps with one tier.
    count : int
    now : float
        Seconds: when it begins, and acts next.
    times : int
        Computations, one after the other.
    waits : Transfer or None
        It does not act before this has ended.
    """

    plan: Plan
    count: int = 1
    now: float = 0.0
    times: int = 1
    waits: Transfer | None = None
    queues: dict[Kind, deque[Transfer]] = field(
        default_factory=lambda: {"write": deque(), "read": deque()}
    )
    _stored: dict[int, Transfer] = field(default_factory=dict)
    _begun: list[Transfer] = field(default_factory=list)  # by token
    _tapes: set[int] = field(default_factory=set)
    moves: int = 0

    def acts(self) -> Iterator[None]:
        """Run the plan; yield where time passes, `now` or `waits` set."""
        for _ in range(self.times):
            self._begun.clear()
            for action, send in drive(self.plan.schedule()):
                answer = yield from self._act(action)
                send(answer)

    def _act(self, action: Action) -> Generator[None, None, Answer]:
        match action:
            case Offer() | Put():
                return (yield from self._write(action))
            case Get():
                return self._begin("read", Transfer(after=self._stored[action.step]))
            case Await():
                yield from self._until(self._begun[action.token])
                return True
            case Evict():
                yield from self._until(self._stored[action.step])
                return True
            case Drop():
                del self._stored[action.step]
            case _:
                self.now += self._step_s(action)
                yield
        return None

    def _step_s(self, action: Action) -> float:
        costs = self.plan.step_costs
        match action:
            case Advance():
                return (action.stop - action.start) * costs.forward_step_s
            case Tape():
                self._tapes.add(action.step)
                return costs.taping_s
            case Reverse() if action.step in self._tapes:
                self._tapes.remove(action.step)
                return costs.reverse_step_s
            case Reverse():
                return costs.turn_s
            case _:
                return 0.0

    def _write(self, action: Offer | Put) -> Generator[None, None, Answer]:
        tier, writing = self.plan.tiers[0], self.queues["write"]
        most = math.inf if tier.capacity_states is None else tier.capacity_states
        if len(writing) >= tier.queue_depth or len(self._stored) >= most:
            if isinstance(action, Offer):
                return None
            yield from self._until(writing[0])
        self._stored[action.step] = transfer = Transfer()
        return self._begin("write", transfer)

    def _begin(self, kind: Kind, transfer: Transfer) -> int:
        """Queue a transfer; return its token."""
        self.queues[kind].append(transfer)
        self._begun.append(transfer)
        self.moves += 1
        return len(self._begun) - 1

    def _until(self, transfer: Transfer) -> Iterator[None]:
        if not transfer.done:
            self.waits = transfer
            yield

    def active(self, kind: Kind) -> Transfer | None:
        """Return the transfer of a kind that is in flight."""
        queue = self.queues[kind]
        if not queue or (queue[0].after is not None and not queue[0].after.done):
            return None
        return queue[0]


def makespan_s(
    groups: Sequence[Group], alone_s: dict[Kind, float], together_s: dict[Kind, float]
) -> float:
    """Return the virtual second at which the last group is done.

    Parameters
    ----------
    groups : sequence of Group
    alone_s : dict
        Seconds in which one rank moves a state, at least, by kind.
    together_s : dict
        Seconds of the store for each state of any rank: its bandwidth.
    """
    now = 0.0
    running = {group: group.acts() for group in groups}
    while running:
        rates: dict[Kind, float] = {}
        for kind in KINDS:
            flows = sum(group.count for group in groups if group.active(kind))
            rates[kind] = 1 / max(alone_s[kind], flows * together_s[kind]) if flows else 0.0
        moving = [
            (transfer, kind)
            for group in groups
            for kind in KINDS
            if (transfer := group.active(kind)) is not None
        ]
        ends = [now + transfer.left / rates[kind] for transfer, kind in moving]
        ready = [group.now for group in running if not group.waits]
        before, now = now, min([*ends, *ready])
        for (transfer, kind), end in zip(moving, ends, strict=True):
            transfer.left = 0.0 if end <= now else transfer.left - (now - before) * rates[kind]
        for group in groups:
            for queue in group.queues.values():
                while queue and queue[0].done:
                    queue.popleft()
        for group in list(running):
            if group.waits and group.waits.done:
                group.waits, group.now = None, max(now, group.now)
            while not group.waits and group.now <= now:
                if next(running[group], "over") == "over":
                    del running[group]
                    break
    return max(group.now for group in groups)


def moves_s(alone_s: float, ranks: int, crowding: float) -> tuple[dict[Kind, float], ...]:
    """Return what `makespan_s` takes: the seconds of a rank alone, and of the store for each state.

    All ranks together take `crowding` times as long as one alone.
    """
    return dict.fromkeys(KINDS, alone_s), dict.fromkeys(KINDS, alone_s * crowding / ranks)


def compared(n_steps: int, slots: int, alone_s: float, crowding: float) -> dict[str, float]:
    """Return makespans of both ways, and what planning took."""
    tier = Tier("shared", alone_s, alone_s)
    costs, memory = Costs(1.0, 2.0, tiers=(tier,)), f"{slots} slots"
    uncoordinated = plan(costs, memory, n_steps)
    began = time.perf_counter()
    fair = plan(replace(costs, tiers=(tier.slower(crowding),)), memory, n_steps)
    plan_s = time.perf_counter() - began
    rates = moves_s(alone_s, RANKS, crowding)
    row = {
        name: makespan_s([Group(made, RANKS)], *rates)
        for name, made in (("uncoordinated", uncoordinated), ("coordinated", fair))
    }
    less = replace(tier.slower(crowding), write_s=alone_s * crowding / GROUPS)
    apart_s, times = row["coordinated"] / GROUPS, 4
    made = plan(replace(costs, tiers=(less,)), memory, n_steps)
    groups = [Group(made, RANKS // GROUPS, apart_s * k, times) for k in range(GROUPS)]
    makespan_s(groups, *rates)
    revolve_s = plan(replace(costs, tiers=()), memory, n_steps).makespan_s
    return row | {
        "staggered": max(each.now - apart_s * k for k, each in enumerate(groups)) / times,
        "alone": uncoordinated.makespan_s,
        "revolve": revolve_s,
        "plan_s": plan_s,
        "gain": row["uncoordinated"] / row["coordinated"],
    }


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    lengths = (500, 2000) if args.quick else (500, 2000, 10_000)
    grid = [
        (n, slots, 1.0, crowding)
        for n in lengths
        for slots in (5, 10, 20)
        for crowding in (8.0, 32.0, 128.0, 512.0)
    ]
    rows = {case: compared(*case) for case in dict.fromkeys([CASE, *grid])}
    for (n, slots, _, crowding), row in rows.items():
        print(
            f"{n:>6} steps, {slots:>2} slots, {crowding:>4g} times slower together: "
            f"{row['uncoordinated']:>8.0f} s uncoordinated, {row['coordinated']:>8.0f} s "
            f"coordinated ({row['gain']:.2f}), {row['revolve']:>8.0f} s without the store, "
            f"staggered {row['staggered']:>8.0f} s"
        )
    used = [
        row
        for row in rows.values()
        if row["revolve"] > 1.2 * row["coordinated"] > 1.2 * 1.01 * row["alone"]
    ]
    gains = sorted(row["gain"] for row in used)
    ratios = {
        "coordinated_gain": rows[CASE]["gain"],
        "gain_median": statistics.median(gains),
        "gain_least": gains[0],
        "gain_most": gains[-1],
        "staggered_gain": statistics.median(r["coordinated"] / r["staggered"] for r in used),
        "plan_s": max(row["plan_s"] for row in rows.values()),
    }
    samples = [{"case": case, **row} for case, row in rows.items()]
    finish(args, "shared_store", samples, ratios)


if __name__ == "__main__":
    main()
