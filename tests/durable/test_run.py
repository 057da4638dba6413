"""A run that is broken off and called again ends with the same gradient, bit for bit."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chains import CHAINS, kept, raw, store_all
from leaks import no_leak as no_leak
from simple_runs import FAST, BrokenOff, gradient, leave_broken, plain, simple
from unequal_chains import KINDS, Case

from multistage import Costs, FunctionChain, Reversal, StageCosts, Tier, reverse
from multistage.durable.folder import Folder
from multistage.durable.headers import UNEQUAL, VERSION
from multistage.durable.run import DurableRun
from multistage.durable.status import inspect
from multistage.errors import ArgumentError, BudgetError, CheckpointWarning, StateError, StoreError
from multistage.model.stages import Stage
from multistage.reversing import unequal
from multistage.reversing.arguments import Arguments
from multistage.reversing.sweeps import Sweeps

SLOW = Costs(1.0, 1.0, tiers=(Tier("durable", 4.5, 4.5),))
# Of `simple`, as if its steps differed.
EQUAL = StageCosts.uniform(20, Stage("", 1.0, 1.0, 24, 24, gradient_bytes=0), 24)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a state of steps that differ be written and read in the time of a step or two."""
    monkeypatch.setattr(
        unequal, "measured_rates", lambda *_: Tier.of_rates(300.0, 300.0, tapes=False)
    )


class Breaking:
    """A chain that can be broken off, and whose adjoint is an array.

    Where steps differ, adjoints do.
    """

    def __init__(
        self, chain: Any, forward: int | None = None, back: int | None = None, unlike: bool = False
    ) -> None:
        self.in_place, self.state_is_tape = chain.in_place, chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))
        self.chain, self.forward, self.back, self.unlike = chain, forward, back, unlike
        self.steps = self.reversed = 0

    def advance(self, state: Any, start: int, stop: int) -> Any:
        for i in range(start, stop):
            if i == self.forward:
                raise BrokenOff
            state = self.chain.advance(state, i, i + 1)
            self.steps += 1
        return state

    def tape(self, state: Any, step: int) -> Any:
        if step == self.forward:
            raise BrokenOff
        return self.chain.tape(state, step)

    def reverse(self, tape: Any, adjoint: Any, step: int) -> Any:
        if step == self.back:
            raise BrokenOff
        self.reversed += 1
        more = [{"a": (np.ones(step % 7),)}] * (step % 3) if self.unlike else []
        return [np.array(self.chain.reverse(tape, int(adjoint[0]), step)), *more]


def unlike(name: str, n: int) -> Case | None:
    """Return a chain whose steps differ, of small or large states, if that is its name."""
    size, _, kind = name.partition(" ")
    return Case(n, kind, n, {"small": 40, "large": 4000}[size]) if kind else None


def answer(name: str, n: int) -> tuple[bytes, int]:
    """Return last state and adjoint, every state kept."""
    case = unlike(name, n)
    return store_all(name, n) if case is None else case.store_all()


def sweep(
    name: str,
    n: int,
    folder: Path,
    costs: Costs | StageCosts = FAST,
    slots: int = 4,
    forward: int | None = None,
    back: int | None = None,
    until: bool = False,
    **options: Any,
) -> tuple[bytes, int, Breaking]:
    """Run a sweep, or begin one that breaks off; return last state, adjoint and the chain.

    With `until` the end is found, not told.
    """
    case = unlike(name, n)
    make, start = CHAINS[name] if case is None else (case.chain, case.start)
    chain = Breaking(make(), forward, back, case is not None)
    if case is not None and costs is FAST:
        costs = case.costs
    settings: dict[str, Any] = {"durable_every_s": 0, "checked": True, "costs": costs} | options
    settings |= {"n_steps": None if until else n, "durable": folder}
    with Reversal(chain, memory=f"{slots} slots", **settings) as run:
        last = raw(run.forward(start(), (lambda _, i: i == n) if until else None))
        assert run._sweeps.length == n
        adjoint = run.reverse([np.array(1)])
    return last, int(adjoint[0]), chain


def broken_off(name: str, n: int, folder: Path, **options: Any) -> None:
    with pytest.raises(BrokenOff):
        sweep(name, n, folder, **options)


SIZES = [(1, 1), (2, 2), (23, 1), (23, 30)]
GRID = [(name, 23, 4, False) for name in CHAINS]
GRID += [(name, *size, False) for name in ("nested", "in-place-tape") for size in SIZES]
GRID += [("nested", *size, True) for size in SIZES]
GRID += [(name, 23, 4, True) for name in ("nested", "tape", "in-place", "in-place-tape", "fortran")]
UNLIKE = [f"small {kind}" for kind in KINDS]
GRID += [(name, *size, False) for name in UNLIKE for size in SIZES]
GRID += [(f"large {kind}", 12, 3, False) for kind in ("functional", "tape", "in-place")]


@pytest.mark.long(but=("nested-*", "*-in-place-*", "tape-*", "small*"))
@pytest.mark.parametrize("costs", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(("name", "n", "slots", "until"), GRID)
def test_broken_off_often_and_exact(
    name: str, costs: Costs, n: int, slots: int, until: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"slots": slots, "until": until}
    if unlike(name, n) is None:
        taped = not CHAINS[name][0]().state_is_tape
        options["costs"] = Costs(1.0, 1.0, 1.0, tiers=costs.tiers) if taped else costs
    broken: dict[str, int]
    for broken in ({"forward": n // 2}, {"forward": n - 1}, {"back": n - 1}, {"back": n // 2}):
        broken_off(name, n, folder, **options, **broken)
        found, known = inspect(folder), not until or "back" in broken
        assert (found.begun, found.n_steps, found.resumable) == (True, n if known else None, True)
        assert ("the last is not known yet" in str(found)) == (not known)
    broken_off(name, n, folder, **options, back=0)
    last, adjoint, chain = sweep(name, n, folder, **options)
    assert (last, adjoint) == answer(name, n)
    assert chain.reversed <= n
    assert not folder.exists()


def test_until_is_asked_of_no_state_twice_that_was_stored(tmp_path: Path) -> None:
    folder, asked, breaks_at = tmp_path / "run", [], 40

    def step(x: Any, i: int) -> Any:
        if i == breaks_at:
            raise BrokenOff
        return x + i

    def run() -> Any:
        def until(x: Any, i: int) -> bool:
            asked.append(i)
            return bool(x[0] >= 1 + 49 * 50 / 2)  # found by its value, after 50 steps

        with Reversal(step, lambda x, a, i: a + x, durable=folder, costs=FAST) as reversal:
            reversal.forward(np.ones(1), until)
            return reversal.reverse(np.zeros(1)), reversal.report()

    with pytest.raises(BrokenOff):
        run()
    assert asked == list(range(1, 41))
    assert inspect(folder).forward_step == 40
    asked.clear()
    breaks_at = -1
    gradient, report = run()
    assert asked == list(range(41, 51))
    assert gradient.tolist() == [sum(1 + i * (i - 1) / 2 for i in range(50))]
    assert report.n_steps == 50


def test_the_state_after_the_newest_may_be_the_last(tmp_path: Path) -> None:
    """Killed after the last step, before its state was on the disk."""
    folder = tmp_path / "run"
    broken_off("nested", 40, folder, until=True, back=20)
    for path in (*folder.glob("last"), *folder.glob("adjoint-*")):
        path.unlink()
    last, adjoint, chain = sweep("nested", 40, folder, until=True)
    assert (last, adjoint) == store_all("nested", 40)
    assert chain.reversed == 40


@pytest.mark.parametrize("begun", [True, False])
def test_a_found_end_and_a_told_one_are_two_runs(begun: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off("nested", 23, folder, until=begun, back=11)
    with pytest.raises(StoreError, match="an unknown number of steps") as caught:
        sweep("nested", 23, folder, until=not begun)
    assert "n_steps=23" in str(caught.value)
    assert sweep("nested", 23, folder, until=begun)[:2] == store_all("nested", 23)


def test_a_resumed_forward_sweep_continues_from_the_newest_state(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off("nested", 60, folder, forward=40)
    found = inspect(folder)
    assert (found.forward_step, found.states) == (40, 41)
    last, adjoint, chain = sweep("nested", 60, folder)
    assert (last, adjoint) == store_all("nested", 60)
    assert 20 <= chain.steps < 40  # 20 of the forward sweep, few of them again


@pytest.mark.parametrize("how", ["as begun", "prepared", "measured"])
def test_a_resumed_reverse_sweep_runs_no_step_before_it(how: str, tmp_path: Path) -> None:
    """`prepare` neither begins a run nor ends one; costs are measured once."""
    folder, costs = tmp_path / "run", None if how == "measured" else FAST
    broken_off("nested", 60, folder, costs=costs, back=25)
    assert inspect(folder).adjoint_step is not None
    chain, start = Breaking(CHAINS["nested"][0]()), CHAINS["nested"][1]()
    with Reversal(
        chain, n_steps=60, memory="4 slots", durable=folder, durable_every_s=0, costs=costs
    ) as run:
        if how == "prepared":
            run.prepare(start)
        last = raw(run.forward(start))
        assert chain.steps == 0
        (adjoint,) = run.reverse([np.array(1)])
        assert (last, int(adjoint)) == store_all("nested", 60)
        assert chain.steps == 0 or how == "measured"  # every state is on the disk
        assert run.report().n_steps == chain.reversed < 60


@pytest.mark.parametrize("costs", [SLOW, Costs(1.0, 1.0)], ids=["slow", "no tier"])
@pytest.mark.parametrize(
    "planner", ["auto", "store-all", "revolve", "interval", "online", "h-revolve"]
)
def test_any_planner_can_be_resumed(planner: str, costs: Costs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"planner": planner, "costs": costs, "slots": 25, "checked": False}
    for broken in ({"forward": 15}, {"back": 18}, {"back": 3}):
        broken_off("nested", 23, folder, **options, **broken)
    assert inspect(folder).states
    assert sweep("nested", 23, folder, **options)[:2] == store_all("nested", 23)


def test_an_adjoint_harmed_after_forward_is_an_error_and_then_the_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    leave_broken(folder, 20, 7)
    with simple(folder) as run:
        run.forward(np.ones(3))
        for path in folder.glob(f"adjoint-{inspect(folder).adjoint_step}"):
            HARMS["flipped"](path)
        with pytest.raises(StoreError, match="begin again with forward"):
            run.reverse(np.ones(3))
        run.forward(np.ones(3))
        assert np.array_equal(run.reverse(np.ones(3)), plain(20))


# ------------------------------------------------------------ what is not resumed


def left(folder: Path, n: int = 20, **options: Any) -> None:
    """Leave a run behind whose forward sweep is over."""
    run = simple(folder, n, **options)
    run.forward(np.ones(3))
    run.close()


@pytest.mark.parametrize(
    ("n", "state", "options", "reason"),
    [
        (21, np.ones(3), {}, "n_steps=20, this run n_steps=21"),
        (20, np.zeros(3), {}, "another state 0"),
        (20, np.ones(4), {}, r"leaf array \(3,\) float64, this run's array \(4,\) float64"),
        (20, np.ones(3, np.float32), {}, "float64, this run's array .* float32"),
        (20, [np.ones(3)], {}, "its states have leaf array"),
        (20, (np.ones(3), np.ones(3)), {}, "its states have leaf array"),
        (20, np.ones(3), {"durable_label": "b"}, "its label is 'a', this run's 'b'"),
    ],
)
def test_another_run_is_refused(
    n: int, state: Any, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    left(folder, durable_label="a")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StoreError, match=reason) as caught:
        simple(folder, n, **{"durable_label": "a"} | options).forward(state)
    assert "multistage clean --force" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} | {"lock": b""} == (
        before | {"lock": b""}
    )
    assert inspect(folder).resumable


def padded(fill: int, dtype: Any) -> Any:
    """Return a state of ones whose padding bytes are `fill`."""
    from multistage.durable.records import used_bytes

    made = np.ones(5, dtype)
    made.view(np.uint8).reshape(5, -1)[:, ~used_bytes(made.dtype)] = fill
    return made


@pytest.mark.parametrize(
    "dtype", [np.longdouble, np.dtype([("a", "i1"), ("b", "f8")], align=True)], ids=str
)
def test_padding_is_no_difference(dtype: Any, tmp_path: Path) -> None:
    """Its bytes are undefined: another process has others in an equal state, and adjoint."""

    def adjoint_step(x: Any, a: Any, i: int) -> Any:
        if i == back:
            raise BrokenOff
        return a

    def run(fill: int) -> Any:
        with Reversal(
            lambda x, i: x.copy(),
            adjoint_step,
            12,
            durable=tmp_path / "run",
            durable_every_s=0,
            costs=FAST,
        ) as run:
            run.forward(padded(fill, dtype))
            return run.reverse(padded(fill, dtype))

    back = 4
    with pytest.raises(BrokenOff):
        run(0)
    assert inspect(tmp_path / "run").adjoint_step is not None
    back = -1
    assert np.array_equal(run(255), np.ones(5, dtype))


def test_lists_are_no_tuples(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    chain = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    run: Any = Reversal(chain, n_steps=5, memory="3 slots", durable=folder, costs=FAST)
    run.forward([np.ones(1)])
    run.close()
    with pytest.raises(StoreError, match=r"its states are .*this run's"):
        run.forward((np.ones(1),))


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left(folder)
    data = bytearray((folder / "run").read_bytes())
    data[8] = UNEQUAL + 1
    (folder / "run").write_bytes(data)
    with pytest.raises(
        StoreError,
        match=rf"format version {UNEQUAL + 1}, this package writes {VERSION} and {UNEQUAL}",
    ):
        simple(folder).forward(np.ones(3))
    assert not inspect(folder).resumable


def test_a_run_that_did_not_begin_leaves_nothing(tmp_path: Path) -> None:
    def step(x: Any, i: int) -> Any:
        raise BrokenOff

    run: Any = Reversal(step, lambda x, a, i: a, 5, durable=tmp_path / "run")
    with pytest.raises(BrokenOff):  # while it is measured
        run.forward(np.ones(3))
    run = simple(tmp_path / "run")
    run.prepare(np.ones(3))
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_its_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with simple(folder) as first:
        first.forward(np.ones(3))
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            simple(folder).forward(np.ones(3))
        first.reverse(np.ones(3))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tiers": "memory:"}, "leave tiers= out"),
        ({"states": object()}, "not states="),
        ({"durable_every_s": -1}, "durable_every_s=-1"),
        ({"durable_every_s": "1"}, "durable_every_s='1'"),
        ({"durable_every_s": float("nan")}, "durable_every_s=nan"),
        ({"durable_label": 3}, "durable_label=3"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=reason):
        simple(tmp_path / "run", **options)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------- adjoints


def test_the_adjoint_must_be_the_one_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gradient = plain(20)
    leave_broken(folder, 20, 7)
    with simple(folder) as run:
        run.forward(np.ones(3))
        with pytest.raises(ArgumentError, match="differs from the one"):
            run.reverse(np.full(3, 2.0))
        with pytest.raises(ArgumentError, match="differs from the one"):
            run.reverse(np.ones(3, np.float32))
        assert np.array_equal(run.reverse(np.ones(3)), gradient)


def test_an_adjoint_of_other_things_is_refused_before_its_steps(tmp_path: Path) -> None:
    with simple(tmp_path / "run") as run:
        run.forward(np.ones(3))
        with pytest.raises(ArgumentError, match="must be a pytree of arrays"):
            run.reverse(1.0)
        assert np.array_equal(run.reverse(np.ones(3)), plain(20))


def test_an_adjoint_keeps_its_layout(tmp_path: Path) -> None:
    run: Any = Reversal(
        lambda x, i: x, lambda x, a, i: a.astype(np.float64), 9, durable=tmp_path / "run"
    )
    run.forward(np.ones(3))
    with pytest.raises(StateError, match="the adjoint of step 8 changed leaf array"):
        run.reverse(np.ones(3, np.float32))
    run.close()


def test_an_adjoint_is_copied_before_a_step_overwrites_it(tmp_path: Path) -> None:
    """The copy is made before the next step may change the adjoint in place."""
    folder, back = tmp_path / "run", 10

    def adjoint_step(x: Any, a: Any, i: int) -> Any:
        if i == back:
            raise BrokenOff
        a["sum"] += x
        a["now"] *= 0.5
        return a

    def run() -> Any:
        with Reversal(
            lambda x, i: x + 1, adjoint_step, 30, durable=folder, durable_every_s=0, costs=FAST
        ) as reversal:
            reversal.forward(np.zeros(2))
            return reversal.reverse({"sum": np.zeros(2), "now": np.ones(4)})

    with pytest.raises(BrokenOff):
        run()
    back = -1
    gradient = run()
    assert gradient["sum"].tolist() == [435, 435]
    assert gradient["now"].tolist() == [0.5**30] * 4


def test_an_adjoint_in_flight_is_not_overwritten(tmp_path: Path) -> None:
    """While the disk is at one adjoint, those of later steps are passed over."""
    folder, gate = tmp_path / "run", threading.Event()

    def adjoint_step(x: Any, a: Any, i: int) -> Any:
        if i == 15:
            durable.store.flush()
            durable.store.submit(lambda: bool(gate.wait()) and None)
        if i == 4:
            gate.set()
            durable.store.flush()
            raise BrokenOff
        return a * x + i

    run: Any = Reversal(
        lambda x, i: x * 1.01 + i, adjoint_step, 20, durable=folder, durable_every_s=0, costs=FAST
    )
    durable = run._sweeps.given.durable
    run.forward(np.ones(3))
    with pytest.raises(BrokenOff):
        run.reverse(np.ones(3))
    assert inspect(folder).adjoint_step == 15
    assert np.array_equal(gradient(folder), plain(20))


def test_adjoints_are_written_at_their_interval(tmp_path: Path) -> None:
    now, folder = 0.0, tmp_path / "run"
    seen: list[tuple[int, int | None]] = []
    durable = DurableRun(folder, 6.0, clock=lambda: now)

    def tick(x: Any, a: Any, i: int) -> Any:
        nonlocal now
        now += 1.0
        durable.store.flush()
        seen.append((i, inspect(folder).adjoint_step))
        return a + x

    given = Arguments.of(
        FunctionChain(lambda x, i: x + 1, tick),
        n_steps=20,
        memory="3 slots",
        tiers=durable.store,
        durable=durable,
        costs=FAST,
    )
    run = Sweeps(given, progress=False)
    run.forward(np.zeros(2))
    run.reverse(np.zeros(2))
    assert next(step for _, step in seen if step is not None) == 13
    assert dict(seen)[12] == 13
    assert dict(seen)[6] == 7
    run.end(keep=False)


# ------------------------------------------------------------ sweeps and endings


def test_the_next_sweep_of_a_process_starts_again(tmp_path: Path) -> None:
    """What its steps compute may have changed, as a network's weights do."""
    folder, factor = tmp_path / "run", 1.0
    with Reversal(
        lambda x, i: x + factor, lambda x, a, i: a + x, 10, durable=folder, costs=FAST
    ) as run:
        for factor in (1.0, 2.0):
            assert run.forward(np.zeros(1)).tolist() == [10 * factor]
        for factor in (3.0, 4.0):
            assert run.forward(np.zeros(1)).tolist() == [10 * factor]
            assert run.reverse(np.zeros(1)).tolist() == [45 * factor]
    assert not folder.exists()


@pytest.mark.parametrize("before", ["forward", "reversed", "not removed"])
def test_no_state_of_an_earlier_sweep_is_taken_up(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the next sweep of the process, nor by one that resumes that."""
    folder, factor, breaks_at = tmp_path / "run", 1.0, -1

    def step(x: Any, i: int) -> Any:
        if i == breaks_at:
            raise BrokenOff
        return x + factor

    def begin() -> Any:
        return Reversal(
            step, lambda x, a, i: a + x, 10, durable=folder, durable_every_s=0, costs=FAST
        )

    run = begin()
    run.forward(np.zeros(1))
    if before == "reversed":
        run.reverse(np.zeros(1))
    factor = 2.0
    if before == "not removed":
        with monkeypatch.context() as patched:
            patched.setattr(Folder, "names", failing)
            with pytest.raises(StoreError, match="what a run left in it cannot be removed"):
                run.forward(np.zeros(1))
    breaks_at = 4
    with pytest.raises(BrokenOff):
        run.forward(np.zeros(1))
    breaks_at = -1
    with begin() as run:
        assert run.forward(np.zeros(1)).tolist() == [20]
        assert run.reverse(np.zeros(1)).tolist() == [90]


def failing(*_: object) -> list[str]:
    """What a disk that is gone answers in place of the names in a folder."""
    raise OSError(5, "Input/output error")


def test_a_gradient_that_was_not_saved_is_there_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(BrokenOff), simple(folder) as run:
        run.forward(np.ones(3))
        gradient = run.reverse(np.ones(3))
        raise BrokenOff
    assert inspect(folder).complete
    chain = Breaking(FunctionChain(lambda x, i: x, lambda x, a, i: a))
    with Reversal(chain, n_steps=20, memory="4 slots", durable=folder, costs=FAST) as again:
        again.forward(np.ones(3))
        assert np.array_equal(again.reverse(np.ones(3)), gradient)
        assert (chain.steps, chain.reversed) == (0, 0)
        assert again.report().n_steps == 0
    assert not folder.exists()


def test_ctrl_c_leaves_a_run_to_resume(tmp_path: Path) -> None:
    folder, hit = tmp_path / "run", True

    def adjoint_step(x: Any, a: Any, i: int) -> Any:
        if i == 9 and hit:
            raise KeyboardInterrupt
        return a * x + i

    run: Any = Reversal(
        lambda x, i: x * 1.01 + i, adjoint_step, 20, durable=folder, durable_every_s=0, costs=FAST
    )
    run.forward(np.ones(3))
    with pytest.raises(KeyboardInterrupt):
        run.reverse(np.ones(3))
    assert inspect(folder).adjoint_step is not None
    hit = False
    run.forward(np.ones(3))  # the same object will do
    assert np.array_equal(run.reverse(np.ones(3)), plain(20))
    run.close()
    assert not folder.exists()


def test_ctrl_c_while_a_folder_is_given_back_leaves_it_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    options: dict[str, Any] = {"n_steps": 20, "durable": folder, "costs": FAST}
    with monkeypatch.context() as patched:
        patched.setattr(DurableRun, "_agree", interrupted)
        patched.setattr(Folder, "remove", interrupted)
        run: Any = Reversal(lambda x, i: x, lambda x, a, i: a, **options)
        with pytest.raises(KeyboardInterrupt):
            run.forward(np.ones(3))
        run.close()
    left = Folder(folder)
    in_use = left.in_use()
    left.close()
    assert not in_use


def test_in_one_call(tmp_path: Path) -> None:
    result = reverse(
        lambda x, i: x * 1.01 + i,
        lambda x, a, i: a * x + i,
        np.ones(3),
        np.ones(3),
        20,
        costs=FAST,
        memory="3 slots",
        durable=tmp_path / "run",
    )
    assert np.array_equal(result.adjoint, plain(20))
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------- faults

HARMS: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(
        path.read_bytes()[:-30] + b"\xff\xfe\xfd\xfc\xfb\xfa" + path.read_bytes()[-24:]
    ),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


HARMED = ["states", "last", "adjoint", "all", "one"]


@pytest.mark.parametrize(
    ("what", "harm", "chain", "until"),
    [(what, harm, "nested", False) for what in HARMED for harm in HARMS]
    + [(what, "flipped", "nested", True) for what in HARMED]
    + [(what, harm, "small tape", False) for what in HARMED for harm in ("flipped", "cut")],
)
def test_harmed_files_cost_steps_never_bits(
    what: str, harm: str, chain: str, until: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    broken_off(chain, 40, folder, back=20, until=until)
    names = sorted(path.name for path in folder.iterdir())
    newest = min((int(name[8:]) for name in names if name.startswith("adjoint")), default=0)
    for name in names:
        chosen = {
            "states": name.startswith("states"),
            "last": name == "last",
            "adjoint": name.startswith("adjoint"),
            "all": name not in ("run", "lock"),
            "one": name == f"adjoint-{newest}",
        }[what]
        if chosen:
            HARMS[harm](folder / name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        last, adjoint, _ = sweep(chain, 40, folder, until=until)
    assert (last, adjoint) == answer(chain, 40)
    if harm in ("folder", "link", "empty") and folder.exists():  # no file of ours: it stays
        assert all(
            path.is_dir() or path.is_symlink() or not path.stat().st_size
            for path in folder.iterdir()
        )
    else:
        assert not folder.exists()


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm not in ("gone",)])
def test_a_harmed_header_is_refused(harm: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left(folder)
    HARMS[harm](folder / "run")
    ours = harm in ("flipped", "cut")  # what has its beginning is known to be
    reason = "cannot be used" if ours else "was not written by this run"
    with pytest.raises(StoreError, match=f"its file 'run' {reason}"):
        simple(folder).forward(np.ones(3))
    assert not inspect(folder).resumable


@pytest.mark.parametrize("name", ["nested", "small functional"])
def test_a_disk_that_is_full_from_some_file_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Folder.publish
    for room in range(1, 40, 3):
        folder, written = tmp_path / f"run{room}", 0

        def limited(self: Folder, name: str, pieces: Any, room: int = room, **how: bool) -> None:
            nonlocal written
            written += 1
            if written > room:
                raise OSError(28, "No space left on device")
            publish(self, name, pieces, **how)

        monkeypatch.setattr(Folder, "publish", limited)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            last, adjoint, _ = sweep(name, 30, folder)
        assert (last, adjoint) == answer(name, 30)
    assert list(tmp_path.iterdir()) == []


def test_write_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Folder.publish

    def limited(self: Folder, name: str, pieces: Any, **how: bool) -> None:
        if name.startswith(("last", "adjoint")):
            raise OSError(5, "Input/output error")
        publish(self, name, pieces, **how)

    monkeypatch.setattr(Folder, "publish", limited)
    run = simple(tmp_path / "run")
    with pytest.warns(CheckpointWarning, match="the last state cannot be written"):
        run.forward(np.ones(3))
    with pytest.warns(CheckpointWarning, match="the adjoint at step .* cannot be written"):
        gradient = run.reverse(np.ones(3))
    assert np.array_equal(gradient, plain(20))
    run.close()


def test_a_folder_that_cannot_be_written_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "publish", full)
    with pytest.raises(StoreError, match="nothing can be written to it"):
        simple(tmp_path / "run").forward(np.ones(3))


@pytest.mark.parametrize("early", [False, True])
def test_a_folder_that_cannot_be_listed_is_released(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simple(tmp_path / "run")
    if early:
        monkeypatch.setattr(Folder, "names", failing)
        with pytest.raises(StoreError, match="cannot be read: "):
            run.forward(np.ones(3))
    else:
        with run:
            run.forward(np.ones(3))
            run.reverse(np.ones(3))
            monkeypatch.setattr(Folder, "names", failing)
    monkeypatch.undo()
    assert np.array_equal(gradient(tmp_path / "run"), plain(20))  # not in use, nothing lost
    assert not (tmp_path / "run").exists()


def test_nothing_refers_to_a_state_after_a_broken_run(tmp_path: Path) -> None:
    start = np.ones(3)
    run = simple(tmp_path / "run")
    run.forward(start)
    run.close()
    gc.collect()
    start += 1  # writable again


# ------------------------------------------------------------- steps that differ


def flush(run: Reversal[Any, Any]) -> None:
    """Wait for the writer, so that the state that comes next is written."""
    durable = run._sweeps.given.durable
    assert durable is not None
    if durable.store._writer is not None:  # it is open
        durable.store.flush()


def test_states_of_unequal_steps_are_there_after_a_kill(tmp_path: Path) -> None:
    """Whatever the plan writes: here all is kept in memory."""
    folder, case, runs = tmp_path / "run", Case(5, "in-place", 30), list[Any]()

    class Waiting(Breaking):
        def advance(self, state: Any, start: int, stop: int) -> Any:
            flush(runs[-1])
            return super().advance(state, start, stop)

    def ran(**broken: int) -> Any:
        chain = Waiting(case.chain(), **broken)
        options: Any = {"memory": "99 slots", "durable": folder, "durable_every_s": 0}
        with Reversal(chain, costs=case.costs, **options) as run:
            runs.append(run)
            last = raw(run.forward(case.start()))
            steps = chain.steps
            return last, int(run.reverse([np.array(1)])[0]), steps

    for broken in (20, 25):
        with pytest.raises(BrokenOff):
            ran(forward=broken)
        found = inspect(folder)
        assert found.forward_step == found.states == broken and "state 0  " in str(found)
    with pytest.raises(BrokenOff):
        ran(back=9)
    assert ran() == (*case.store_all(), 0)
    assert not folder.exists()


def test_states_of_unequal_steps_wait_for_their_time(tmp_path: Path) -> None:
    case = Case(5, "functional", 30)
    chain = Breaking(case.chain(), back=25)
    with (
        pytest.raises(BrokenOff),
        Reversal(chain, costs=case.costs, memory="99 slots", durable=tmp_path / "run") as run,
    ):
        run.forward(case.start())
        run.reverse([np.array(1)])
    assert inspect(tmp_path / "run").states == 0


def larger(costs: StageCosts) -> StageCosts:
    """Return costs whose states and times are others, but large enough."""
    stages = []
    for each in costs.stages:
        size = each.output_bytes + 800
        stages.append(Stage("", 1 + each.backward_s, 1.0, size, size, gradient_bytes=0))
    return replace(costs, stages=tuple(stages))


def test_other_costs_of_unequal_steps(tmp_path: Path) -> None:
    """Those of other sizes than the states on the disk, or of other steps, are refused."""
    folder, n = tmp_path / "run", 12
    case = Case(n, "functional", n)
    broken_off("small functional", n, folder, back=6)
    small = case.costs.stages[-1]
    less = replace(small, output_bytes=small.output_bytes - 1, tape_bytes=small.tape_bytes - 1)
    costs = replace(case.costs, stages=(*case.costs.stages[:-1], less))
    with pytest.raises(BudgetError, match=rf"state 12 takes {small.output_bytes} bytes, its costs"):
        sweep("small functional", n, folder, costs=costs)
    fewer = replace(case.costs, stages=case.costs.stages[:-1])
    with pytest.raises(StoreError, match=r"has n_steps=12 steps that differ .*this run n_steps=11"):
        sweep("small functional", n - 1, folder, costs=fewer)
    with pytest.raises(StoreError, match=r"n_steps=12 steps that differ \(StageCosts\), this run"):
        chain = Breaking(case.chain())
        Reversal(chain, n_steps=n, costs=FAST, memory="2 slots", durable=folder).forward(
            case.start()
        )
    assert inspect(folder).resumable
    found = sweep("small functional", n, folder, costs=larger(case.costs))
    assert found[:2] == case.store_all()


def test_equal_and_unequal_runs_are_told_apart(tmp_path: Path) -> None:
    left(tmp_path / "run")
    with pytest.raises(StoreError, match=r"n_steps=20, this run n_steps=20 steps that differ"):
        simple(tmp_path / "run", costs=EQUAL).forward(np.ones(3))
    with simple(tmp_path / "other", back=8, costs=EQUAL) as run:
        run.forward(np.ones(3))
        with pytest.raises(BrokenOff):
            run.reverse(np.ones(3))
    assert np.array_equal(gradient(tmp_path / "other", costs=EQUAL), plain(20))


class Patch(NamedTuple):
    """A state of its own class."""

    u: Any
    v: Any


@pytest.mark.parametrize("changes", [False, True])
def test_trees_of_unequal_steps(changes: bool, tmp_path: Path) -> None:
    """Any tree if it stays; one that changes must be one that can be written down."""
    dtype = np.dtype([("a", "i1"), ("b", ">f8", (2,))], align=True)

    def step(state: Any, i: int) -> Any:
        flush(runs[-1])
        values = np.zeros(i + 2, dtype)
        values["b"] = i + state.v.ravel()[0]
        tree = Patch(values, np.asfortranarray(np.full((2, i + 2), values["b"].sum())))
        return Patch(tree, tree.v) if changes and i == 3 else tree

    def adjoint_step(state: Any, adjoint: Any, i: int) -> Any:
        if i == back:
            raise BrokenOff
        assert state.v.flags.f_contiguous
        return {"a": np.append(adjoint["a"] * 0.5, state.v[-1, -1] + state.u["b"].sum())}

    stage = Stage("", 1.0, 1.0, 10_000, 10_000, gradient_bytes=0)
    start = Patch(np.zeros(2, dtype), np.ones((2, 2), order="F"))
    seed, folder, n, runs = {"a": np.ones(1)}, tmp_path / "run", 7, list[Any]()

    def found() -> Any:
        options: Any = {"durable": folder, "durable_every_s": 0, "memory": "1 slot"}
        costs = StageCosts.uniform(n, stage, 10_000)
        with Reversal(step, adjoint_step, costs=costs, **options) as run:
            runs.append(run)
            run.forward(start)
            return run.reverse(seed)["a"]

    back = 2
    if changes:
        with pytest.raises(StateError, match="dicts with keys of str and int, lists and tuples"):
            found()
        return
    with pytest.raises(BrokenOff):
        found()
    back = -1
    chain = FunctionChain(step, adjoint_step)
    assert found().tobytes() == kept(chain, start, seed, n)[1]["a"].tobytes()


def test_a_state_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Folder.publish

    def limited(self: Folder, name: str, pieces: Any, **how: bool) -> None:
        if name.startswith("states"):
            raise OSError(5, "Input/output error")
        publish(self, name, pieces, **how)

    monkeypatch.setattr(Folder, "publish", limited)

    def step(x: Any, i: int) -> Any:
        flush(run)
        return x * 1.01 + i

    options: Any = {"durable": tmp_path / "run", "durable_every_s": 0, "memory": "99 slots"}
    with Reversal(step, lambda x, a, i: a * x + i, costs=EQUAL, **options) as run:
        with pytest.warns(CheckpointWarning, match="a state cannot be written: .*Input/output"):
            run.forward(np.ones(3))
        assert np.array_equal(run.reverse(np.ones(3)), plain(20))


@pytest.mark.parametrize("costs", [FAST, EQUAL])
def test_several_functionals_are_resumed_together(
    costs: Costs | StageCosts, tmp_path: Path
) -> None:
    seeds, folder = [np.ones(3), np.arange(3.0)], tmp_path / "run"
    with simple(folder, back=8, functionals=2, costs=costs) as run:
        run.forward(np.ones(3))
        with pytest.raises(BrokenOff):
            run.reverse(seeds)
    chain = FunctionChain(lambda x, i: x * 1.01 + i, lambda x, a, i: a * x + i)
    with simple(folder, functionals=2, costs=costs) as run:
        run.forward(np.ones(3))
        with pytest.raises(ArgumentError, match="differs from the one this run was reversed with"):
            run.reverse(seeds[::-1])
        found: Any = run.reverse(seeds)
        assert run.report().counts.reverse_steps < 20
    for one, seed in zip(found, seeds, strict=True):
        assert one.tobytes() == kept(chain, np.ones(3), seed, 20)[1].tobytes()
