"""Table 1, figure 2 and theorem 1 of Beaumont et al. 2019 (RR-9302), by exhaustive search.

Table 1: a machine written from the table alone must count what our judge counts,
on the paper's example sequence and on schedules of random chains.  Figure 2: the
chain for which no persistent schedule is optimal.  Theorem 1: on random short
chains and every memory limit, our dynamic program and the one *as printed*
beside the optimum over all persistent schedules.  Rounding: what sizes rounded
up to M/S each cost, against the printed 1 + 1/S.

    python -m benchmarks.chain_theorem [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import finish, from_tests, options
from benchmarks.chain_solver import a_chain
from multistage.actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from multistage.model.stages import Stage, StageCosts
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.sizes import Sizes, need_to_pass
from multistage.planners.chain.table import Trace, judge

SLOTS = 500
# Section 3.1: F1ck F2 F3ck F4all F5all B5 B4 F3all B3 F1all F2all B2 B1, for L = 4.
EXAMPLE: tuple[Action, ...] = (
    Advance(0, 2),
    Save(2),
    Advance(2, 3),
    Tape(3),
    EndForward(),
    Reverse(3),
    Load(2),
    Free(2),
    Tape(2),
    Reverse(2),
    Load(0),
    Tape(0),
    Tape(1),
    Reverse(1),
    Reverse(0),
)


def random_chain(seed: int, length: int, largest: int) -> StageCosts:
    """Return a chain of whole seconds and bytes, as the model of the paper has it."""
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output = draw.randint(1, largest)
        over = draw.choice([0, draw.randint(0, largest)])
        stages.append(
            Stage(
                f"s{k}",
                forward_s=float(draw.randint(0, 5)),
                backward_s=float(draw.randint(0, 3)),
                output_bytes=output,
                tape_bytes=output + draw.randint(0, largest),
                forward_overhead_bytes=over,
                tape_overhead_bytes=over,  # table 1 has one o_f for both
                backward_overhead_bytes=draw.choice([0, draw.randint(0, largest)]),
            )
        )
    return StageCosts(tuple(stages), draw.randint(1, 4), draw.randint(1, 4))


# ---------------------------------------------------------------------- table 1


def _bytes_of(items: set[tuple[str, int]], costs: StageCosts) -> int:
    """Return the bytes of items of table 1."""
    s, total = costs.stages, 0
    for kind, i in items:
        if kind == "A":
            total += s[i - 1].tape_bytes
        elif kind == "a" and ("A", i) not in items:
            total += s[i - 1].output_bytes if i else costs.input_bytes
        elif kind == "d":
            total += costs.input_gradient_bytes if i == 0 else s[i - 1].gradient_bytes
    return total


def table_1(actions: Sequence[Action], costs: StageCosts) -> tuple[float, int]:
    """Return seconds and peak bytes, counted from table 1 and nothing else.

    An item is ("a", i), the tape ("A", i) of stage i, which includes a^i, or
    ("d", i).  An operation takes its input, its output and its overhead; what it
    replaces goes, unless it is saved or state 0, which stays for the caller.
    """
    s, over_bytes = costs.stages, costs.reverse_bytes
    held, saved, live = {("a", 0)}, {0}, 0
    seconds, peak = 0.0, 0

    def run(stage: int, made: set[tuple[str, int]], over: int, took: float) -> None:
        nonlocal seconds, peak
        peak = max(peak, _bytes_of(held | made, costs) + over)
        seconds += took
        held.update(made)

    def leave(i: int) -> None:
        if i not in saved and ("A", i + 1) not in held:
            held.discard(("a", i))

    for action in actions:
        match action:
            case Advance(start, stop):
                for i in range(start, stop):
                    run(i + 1, {("a", i + 1)}, s[i].forward_overhead_bytes, s[i].forward_s)
                    leave(i)
                live = stop
            case Tape(i):
                run(i + 1, {("A", i + 1)}, s[i].tape_overhead_bytes, s[i].forward_s)
                live = i + 1
            case EndForward():
                run(live, {("d", live)}, 0, 0.0)
                leave(live)
            case Reverse(i):
                if ("A", i + 1) not in held:
                    run(i + 1, {("A", i + 1)}, s[i].tape_overhead_bytes, s[i].forward_s)
                if live == i + 1:  # what the tape led to is in it
                    held.discard(("a", live))
                run(i + 1, {("d", i)}, over_bytes[i], s[i].backward_s)
                held -= {("d", i + 1), ("A", i + 1)}
                leave(i)
            case Save(i):
                saved.add(i)
            case Free(i):
                saved.discard(i)
            case Load(i):
                live = i
    assert held == {("a", 0), ("d", 0)}, held
    return seconds, peak


def against_table_1(count: int, seed: int) -> int:
    """Return how many schedules the judge and table 1 disagree on."""
    example = random_chain(seed, 4, 50)
    schedules: list[tuple[Sequence[Action], StageCosts]] = [(EXAMPLE, example)]
    for k in range(count):
        costs = random_chain(seed + k, 3 + k % 6, 40)
        least, plain = smallest_memory(costs), plan_chain(costs).plain_bytes
        limit = least + (plain - least) * (k % 4) // 3
        schedules.append((plan_chain(costs, limit).actions, costs))
    wrong = 0
    for actions, costs in schedules:
        use = use_of(actions, costs)
        wrong += (use.makespan_s, use.peak_bytes) != table_1(actions, costs)
    return wrong


# --------------------------------------------------------------------- figure 2


def counterexample(n: int, tape_2: int) -> StageCosts:
    """Return figure 2's chain with k = n - 1: peaks 6 in the middle, 7 at the end, M = 8.

    The text leaves the tapes open; `tape_2` is that of F2.
    """
    length = n + 2
    stages = []
    for j in range(1, length + 1):
        output = 1 if j == 1 else 2
        before = {1: 0, 2: 1}.get(j, 2)
        over = max(0, (7 if j == length else 6 if j > 2 else 0) - before - output)
        stages.append(
            Stage(
                f"F{j}",
                forward_s={1: n - 1.0, 2: 2.0}.get(j, 0.0),
                backward_s=0.0,
                output_bytes=output,
                tape_bytes=tape_2 if j == 2 else output + over,
                gradient_bytes=0,
                forward_overhead_bytes=over,
            )
        )
    return StageCosts(tuple(stages))


def figure_2(lengths: Sequence[int]) -> list[dict[str, float]]:
    """Return makespans of figure 2's chain: persistent, any, and ours."""
    exact_chain_makespan = from_tests("oracles.chain_exact").exact_chain_makespan
    rows = []
    for n in lengths:
        for tape_2 in (2, 5):
            costs = counterexample(n, tape_2)
            rows.append(
                {
                    "n": n,
                    "tape_2": tape_2,
                    "persistent": exact_chain_makespan(costs, 8),
                    "any": exact_chain_makespan(costs, 8, persistent=False, pinned=False),
                    "ours": plan_chain(costs, 8).makespan_s,
                    "printed_persistent": 3 * n + 1,
                    "printed_any": 2 * n + 2,
                }
            )
    return rows


# -------------------------------------------------------------------- theorem 1


def printed(sizes: Sizes, memory: int, corrected: bool = False) -> tuple[float, Trace]:
    """Return the makespan and the schedule of algorithms 1 and 2 as printed, in whole bytes.

    As they stand but for what cannot be run: pairs are solved by growing length,
    and a negative m is infeasible.  `corrected` counts in m_all the gradient that
    B makes, which is all that the printed theorem lacks.
    """
    n = len(sizes)
    table: dict[tuple[int, int, int], tuple[float, int]] = {}

    def m_all(s: int, t: int) -> int:
        tape, made = int(sizes.tape[s]), int(sizes.gradient[s]) if corrected else 0
        return tape + max(
            int(sizes.gradient[t + 1]) + int(sizes.taping[s]),
            int(sizes.gradient[s + 1]) + made + int(sizes.reverse[s]),
        )

    def cost(s: int, t: int, m: int) -> float:
        return table[s, t, m][0] if m >= 0 else math.inf

    for s in range(n - 1, -1, -1):
        for t in range(s, n):
            need = m_all(s, t)
            passing = need_to_pass(sizes, s, t) if t > s else 0
            for m in range(memory + 1):
                both = float(sizes.forward_s[s]) + float(sizes.reverse_s[s])
                best, choice = math.inf, -1
                if s == t:
                    table[s, t, m] = (both, s) if m >= need else (math.inf, -1)
                    continue
                if m >= passing:
                    ran = 0.0
                    for k in range(s + 1, t + 1):
                        ran += float(sizes.forward_s[k - 1])
                        found = ran + cost(k, t, m - int(sizes.state[k])) + cost(s, k - 1, m)
                        if found < best:
                            best, choice = found, k
                if m >= need:
                    found = both + cost(s + 1, t, m - int(sizes.tape[s]))
                    if found < best:
                        best, choice = found, s
                table[s, t, m] = best, choice
    whole = (0, n - 1, memory)
    seconds = table[whole][0]
    return seconds, [] if math.isinf(seconds) else _trace_of(table, whole, sizes)


def _trace_of(
    table: dict[tuple[int, int, int], tuple[float, int]],
    whole: tuple[int, int, int],
    sizes: Sizes,
) -> Trace:
    """Return the choices of the table that the optimum is made of."""
    trace: Trace = []
    waiting = [whole]
    while waiting:
        s, t, m = waiting.pop()
        k = table[s, t, m][1]
        trace.append((s, t, k))
        if s == t:
            continue
        if k == s:
            waiting.append((s + 1, t, m - int(sizes.tape[s])))
        else:
            waiting.append((s, k - 1, m))
            waiting.append((k, t, m - int(sizes.state[k])))
    return trace


def theorem_1(count: int, seed: int) -> list[dict[str, float]]:
    """Return one row per chain and limit: the optimum, ours, and the printed algorithm's."""
    exact_chain_makespan = from_tests("oracles.chain_exact").exact_chain_makespan
    rows = []
    for k in range(count):
        costs = random_chain(seed + k, 3 + k % 3, 6)
        sizes = Sizes.of(costs)
        least, plain = smallest_memory(costs), plan_chain(costs).plain_bytes
        for memory in range(least, plain, max(1, (plain - least) // 6)):
            seconds, trace = printed(sizes, memory - costs.input_bytes)
            rows.append(
                {
                    "chain": k,
                    "memory": memory,
                    "exact": exact_chain_makespan(costs, memory),
                    "ours": plan_chain(costs, memory).makespan_s,
                    "corrected": printed(sizes, memory - costs.input_bytes, True)[0],
                    "printed": seconds,
                    "printed_peak": judge(sizes, trace)[1] + costs.input_bytes,
                }
            )
    return rows


def rounding(length: int, seed: int) -> float:
    """Return how much a chain with every tape kept grows when sizes are rounded up to M/S."""
    costs = a_chain(length, seed)
    tapes = [stage.tape_bytes for stage in costs.stages]
    unit = sum(tapes) / SLOTS
    return sum(math.ceil(nbytes / unit) for nbytes in tapes) * unit / sum(tapes) - 1


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    wrong = against_table_1(40 if args.quick else 1_000, args.seed)
    example = use_of(EXAMPLE, random_chain(args.seed, 4, 50))
    persistency = figure_2((4, 5) if args.quick else (4, 5, 6, 7))
    rows = theorem_1(30 if args.quick else 1_000, args.seed)
    for row in rows:
        assert row["ours"] >= row["exact"] - 1e-9, f"below the optimum: {row}"
    large = [row for row in persistency if row["tape_2"] == 5]
    small = [row for row in persistency if row["tape_2"] == 2]
    ratios = {
        "example_forward_steps": float(example.forward_steps),
        "table_1_disagreements": float(wrong),
        "persistent_over_any": min(row["persistent"] / row["any"] for row in persistency),
        "persistent_off_large": max(abs(r["persistent"] - r["printed_persistent"]) for r in large),
        "any_off_large": max(abs(r["any"] - r["printed_any"]) for r in large),
        "persistent_off_small": max(abs(r["persistent"] - r["printed_persistent"]) for r in small),
        "any_off_small": max(abs(r["any"] - r["printed_any"]) for r in small),
        # Both printed makespans at once, for whichever size of the tape fits them best.
        "figure_2_off": min(
            abs(r["persistent"] - r["printed_persistent"]) + abs(r["any"] - r["printed_any"])
            for r in persistency
        ),
        "ours_not_optimal": statistics.mean(row["ours"] > row["exact"] + 1e-9 for row in rows),
        "corrected_not_optimal": statistics.mean(
            abs(row["corrected"] - row["exact"]) > 1e-9 for row in rows
        ),
        "printed_over_limit": statistics.mean(row["printed_peak"] > row["memory"] for row in rows),
        "printed_not_optimal": statistics.mean(
            abs(row["printed"] - row["exact"]) > 1e-9 for row in rows
        ),
        "rounding_339": rounding(339, args.seed),
        "rounding_printed": 1 / SLOTS,
        "instances": float(len(rows)),
    }
    assert ratios["table_1_disagreements"] == 0
    finish(args, "chain_theorem", {"figure_2": persistency, "theorem_1": rows}, ratios)
    if args.plot:
        _plot(persistency, rows, args.plot)


def _plot(persistency: list[dict[str, float]], rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for tape_2, style in ((2, "o"), (5, "s")):
        of = [row for row in persistency if row["tape_2"] == tape_2]
        n: list[Any] = [row["n"] for row in of]
        for key, color in (("persistent", "C1"), ("any", "C0")):
            label = f"{key}, tape of F2 is {tape_2}"
            left.plot(n, [row[key] for row in of], style, color=color, mfc="none", label=label)
    n = sorted({row["n"] for row in persistency})
    left.plot(n, [3 * k + 1 for k in n], "C1:", label="printed: 3n + 1")
    left.plot(n, [2 * k + 2 for k in n], "C0:", label="printed: 2n + 2")
    left.set_xticks(n)
    left.set_xlabel("n")
    left.set_ylabel("makespan")
    left.set_title("Figure 2's chain, exhaustive search")
    left.legend(fontsize=7)
    over = [100 * (row["printed_peak"] / row["memory"] - 1) for row in rows]
    right.hist(over, bins=40, color="C3")
    right.axvline(0, color="k", lw=1)
    right.set_yscale("log")
    right.set_xlabel("true peak above the limit (%)")
    right.set_ylabel("instances")
    right.set_title("Schedules of theorem 1 as printed")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
