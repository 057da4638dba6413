"""Change the import and nothing else: pyrevolve's names, calls and gradients, beside its own."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from test_pyrevolve import Problem, store_all

from multistage.errors import ArgumentError, BudgetError
from multistage.interop import pyrevolve as ours
from multistage.model.costs import Costs
from multistage.planners.single.binomial import nu

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, at import
peer = pytest.importorskip("pyrevolve")

MODULES = [
    "",
    ".compression",
    ".crevolve",
    ".profiling",
    ".pyrevolve",
    ".schedulers",
    ".schedulers.base",
    ".schedulers.crevolve",
    ".schedulers.hrevolve",
    ".storage",
    ".tools",
]
# What there is no equivalent of: H-Revolve's tables and sequences, the place of a
# compressed checkpoint in one buffer, and the steps of their own driver, which a
# subclass that defines them is refused for.  Neither are their modules `logger`,
# which writes to standard error once imported, and `custom_pickle`.
EXCEPTIONS = {
    "get_hopt_table",
    "argmin",
    "official_names",
    "Function",
    "Sequence",
    "Operation",
    "HAction.h_operations",
    "HRevolve.hrevolve",
    "HRevolve.hrevolve_aux",
    "BytesStorage.get_location",
    "CRevolve.turn",
    *(
        f"{kind}Revolver.{step}_checkpoint"
        for kind in ("Base", "SingleLevel", "MultiLevel", "Memory", "Disk", "")
        for step in ("save", "load", "remove")
    ),
    *(
        f"{kind}Revolver.storage_list"  # of each revolver, not of the class
        for kind in ("Base", "SingleLevel", "MultiLevel", "Memory", "Disk", "")
    ),
}
# What their modules import for themselves.
FOREIGN = {"ABCMeta", "abstractmethod", "abstractproperty", "absolute_import", "Enum"} | {
    "reduce",
    "mul",
    "logger",
    "Timer",
    "default_timer",
    "partial",
}


def names_of(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in FOREIGN
    ]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_theirs_is_here(name: str) -> None:
    theirs = importlib.import_module("pyrevolve" + name)
    here = importlib.import_module("multistage.interop.pyrevolve" + name)
    missing = set()
    for found in set(names_of(theirs)) - EXCEPTIONS:
        if not hasattr(here, found):
            missing.add(found)
            continue
        value = getattr(theirs, found)
        if inspect.isclass(value):
            missing |= {
                f"{found}.{attribute}"
                for attribute in dir(value)
                if not attribute.startswith("_")
                and not hasattr(getattr(here, found), attribute)
                and not _set_by_init(getattr(here, found), attribute)
            }
    assert missing - EXCEPTIONS == set()
    if not name:
        assert here.__version__ == theirs.__version__


def _set_by_init(kind: Any, name: str) -> bool:
    """Whether an attribute is of each object, which a class does not show."""
    return any(
        f"self.{name}" in inspect.getsource(each)
        for each in kind.__mro__
        if each.__module__.startswith("multistage")
    )


@pytest.mark.parametrize(
    "name",
    ["Revolver", "MemoryRevolver", "DiskRevolver", "SingleLevelRevolver", "MultiLevelRevolver"],
)
def test_parameters_come_in_the_same_order(name: str) -> None:
    theirs = list(inspect.signature(getattr(peer, name)).parameters)
    here = list(inspect.signature(getattr(ours, name)).parameters)
    assert here[: len(theirs)] == theirs
    of_objects = set(vars(made(peer, name)[1])) | {"scheduler"}
    revolver = made(ours, name)[1]
    for attribute in of_objects:
        assert attribute.startswith("_") or hasattr(revolver, attribute), attribute


def made(package: Any, name: str, n: int = 7, folder: str = "./") -> tuple[Problem, Any]:
    problem = Problem(width=8)
    three = problem.operators()
    if name != "MultiLevelRevolver":
        return problem, getattr(package, name)(*three, 3, n)
    size, dtype = problem.size, problem.dtype
    profiler = package.Profiler()
    levels = [
        package.NumpyStorage(size, 2, dtype, profiler),
        package.NumpyStorage(size, 3, dtype, profiler, 1, 1),
    ]
    return problem, package.MultiLevelRevolver(*three, n, levels)


# Each call as pyrevolve documents it: by position, by name, with every option.
CALLS: dict[str, Callable[[Any, Any, int, Any, str], Any]] = {
    "positional": lambda p, o, n, s, f: p.Revolver(*o, s, n),
    "all positional": lambda p, o, n, s, f: p.Revolver(*o, s, n, None, None, None),
    "by name": lambda p, o, n, s, f: p.MemoryRevolver(
        checkpoint=o[0],
        fwd_operator=o[1],
        rev_operator=o[2],
        n_checkpoints=s,
        n_timesteps=n,
        timings=None,
        profiler=p.Profiler(),
        compression_params={"scheme": None},
    ),
    "single level": lambda p, o, n, s, f: p.SingleLevelRevolver(
        *o, n_checkpoints=s, n_timesteps=n, diskstorage=False
    ),
    "disk": lambda p, o, n, s, f: p.DiskRevolver(*o, s, n, filedir=f),
    "disk, many files": lambda p, o, n, s, f: p.SingleLevelRevolver(
        *o, s, n, diskstorage=True, filedir=f, singlefile=False
    ),
    "levels": lambda p, o, n, s, f: p.MultiLevelRevolver(
        *o,
        n,
        storage_list=[
            p.NumpyStorage(o[0].size, s or 2, o[0].dtype, profiler=p.Profiler()),
            p.DiskStorage(o[0].size, n, o[0].dtype, profiler=p.Profiler(), filedir=f, wd=1, rd=1),
        ],
        uf=1,
        ub=2,
        up=1,
    ),
    "a level added": lambda p, o, n, s, f: _reloaded(p.MultiLevelRevolver(*o, n, _one(p, o, s))),
}


def _one(package: Any, operators: Any, count: int | None) -> list[Any]:
    checkpoint = operators[0]
    profiler = package.Profiler()
    return [package.NumpyStorage(checkpoint.size, count or 2, checkpoint.dtype, profiler)]


def _reloaded(revolver: Any) -> Any:
    revolver.addNumpyStorage()
    revolver.storage_list[1].wd = revolver.storage_list[1].rd = 2
    revolver.reload_scheduler(1, 1, 1)
    return revolver


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_pyrevolve(call: str, tmp_path: Path) -> None:
    folder = f"{tmp_path}/"
    for n in [*range(1, 22), 33, 40]:
        last, exact = store_all(n, width=8)
        for slots in {None, 1, 2, 5, n + 3} if n in (1, 2, 3, 20, 40) else {None, 1 + n % 7}:
            problem = Problem(width=8)
            revolver = CALLS[call](ours, problem.operators(), n, slots, folder)
            revolver.apply_forward()
            assert np.array_equal(problem.u, last)
            revolver.apply_reverse()
            assert np.array_equal(problem.v, exact)
            if n > 1:  # pyrevolve ends in a segmentation fault
                beside = Problem(width=8)
                theirs = CALLS[call](peer, beside.operators(), n, slots, folder)
                theirs.apply_forward()
                theirs.apply_reverse()
                assert np.array_equal(problem.v, beside.v), (n, slots)


@pytest.mark.parametrize("memory", ["1 slots", "5 slots", "40 slots", 64 * 1024])
def test_gradients_within_a_memory(memory: str | int) -> None:
    for n in range(1, 41):
        problem = Problem(width=8)
        with ours.MemoryRevolver(*problem.operators(), None, n, memory=memory) as revolver:
            assert np.array_equal(problem.gradient(revolver), store_all(n, width=8)[1]), n


def test_their_own_example() -> None:
    """As examples/use_modernised.py: arrays are bound again, and wider than is said."""

    class Symbol:
        def __init__(self, size: int) -> None:
            self.data = np.zeros(size)

    u, m, v = Symbol(4), Symbol(4), Symbol(1)
    m.data = np.full(4, 0.1)

    class Forward(ours.Operator):
        def apply(self, t_start: int, t_end: int) -> None:  # type: ignore[override]
            for _ in range(t_start, t_end):
                u.data = u.data + m.data

    class Backward(ours.Operator):
        def apply(self, t_start: int, t_end: int) -> None:  # type: ignore[override]
            v.data = v.data + u.data * m.data

    class Symbols(ours.Checkpoint):
        dtype, size = np.float32, 8  # type: ignore[assignment]

        def get_data(self, timestep: int) -> Any:
            return [u.data, m.data]

        get_data_location = get_data

    revolver = ours.Revolver(Symbols(), Forward(), Backward(), None, 30)
    revolver.apply_forward()
    assert np.allclose(u.data, 3.0)
    revolver.apply_reverse()
    exact = np.zeros(4)
    for t in reversed(range(30)):
        x = np.zeros(4)
        for _ in range(t + 1):
            x = x + m.data
        exact = exact + x * m.data
    assert np.array_equal(v.data, exact)


# ---------------------------------------------------------------- schedulers


class Tape:
    """Runs a scheduler as pyrevolve's driver does; counts instead of computing."""

    def __init__(self, scheduler: Any, n: int) -> None:
        self.held: dict[tuple[int, int], int] = {}
        self.live, self.left, self.steps, self.peak = 0, n, 0, 0
        last = n
        for _ in itertools.count():
            action = scheduler.next()
            kind, at = action.type, (action.storageIndex(), action.capo)
            if kind == action.ADVANCE:
                assert action.old_capo == self.live < action.capo <= last
                self.steps += action.capo - action.old_capo
                self.live = action.capo
            elif kind == action.TAKESHOT:
                assert action.capo == self.live
                self.held[at] = self.live
                self.peak = max(self.peak, sum(1 for level, _ in self.held if level == 0))
            elif kind == action.RESTORE:
                self.live = self.held[at]
            elif kind == action.CPDEL:
                del self.held[at]
            elif kind in (action.REVERSE, action.REVSTART):
                if action.capo == n and kind == action.REVERSE:  # H-Revolve's end of forward
                    assert self.live == n
                    continue
                assert self.live == action.capo == self.left - 1
                self.left -= 1
            elif kind == action.TERMINATE:
                break
        assert self.left == 0
        assert scheduler.next().type == action.TERMINATE


@pytest.mark.parametrize("n", [1, 2, 3, 10, 33])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_schedulers_by_hand(n: int, slots: int) -> None:
    here, theirs = ours.pyrevolve, peer.pyrevolve
    ran = Tape(here.CRevolve(slots, n), n)
    assert ran.steps == nu(n, slots)
    assert here.CRevolve(slots, n).ratio == theirs.CRevolve(slots, n).ratio
    architecture = ours.Architecture(None, wd=[0, 2], rd=[0, 1], sizes=[slots, 9])
    scheduler = here.HRevolve(n, n, architecture, 1, 2)
    ran = Tape(scheduler, n)
    assert ran.peak <= slots
    assert scheduler.ratio * n == pytest.approx(ran.steps)
    assert sorted(set(scheduler.storage(0) + scheduler.storage(1)))[0] == 0
    theirs_made = theirs.HRevolve(
        n, n, theirs.Architecture(None if slots == 0 else _levels(architecture)), 1, 2
    )
    assert scheduler.makespan <= theirs_made.makespan
    scheduler.resetSequence()
    assert Tape(scheduler, n).steps == ran.steps


def _levels(architecture: Any) -> list[Any]:
    level = type("Level", (), {})
    levels = []
    for size, write, read in zip(architecture.sizes, architecture.wd, architecture.rd, strict=True):
        levels.append(level())
        levels[-1].nckp, levels[-1].wd, levels[-1].rd = size, write, read
    return levels


def test_output_of_c_and_python_is_captured(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        with ours.OutputGrabber(stream) as grabbed:
            os.write(stream.fileno(), b"from a core written in C\n")
            stream.write("and from Python" + "." * 100_000)
        assert grabbed.capturedtext.startswith("from a core written in C\nand from Python.")
        assert len(grabbed.capturedtext) > 100_000
        stream.write("after")
    assert (tmp_path / "stream").read_text() == "after"


# ------------------------------------------------- no argument without effect


@pytest.mark.parametrize("count", ["5", 2.5, True, -1, 0])
def test_a_number_of_checkpoints_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ArgumentError, match="n_checkpoints="):
        ours.MemoryRevolver(*Problem().operators(), count, 9)


def test_arguments_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    three = Problem().operators()
    with pytest.raises(ArgumentError, match="n_checkpoints=5 and memory='9 slots'"):
        ours.Revolver(*three, 5, 9, memory="9 slots")
    with pytest.raises(ArgumentError, match=r"filedir=.*tiers='memory:'"):
        ours.DiskRevolver(*three, None, 9, filedir=str(tmp_path), tiers="memory:")
    for params, message in (
        ({"scheme": "blosc", "chunksize": 1}, r"no parameters \['chunksize'\]"),
        ({"scheme": "zfp", "tolerence": 1}, r"no parameters \['tolerence'\]"),
        ({"scheme": "zfp", "tolerance": 1, "rate": 8}, "exclude each other"),
        ({"scheme": None, "tolerance": 1}, "it has none"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ours.compression.init_compression(params)
    with pytest.raises(ArgumentError, match=r"no parameters \['schema'\]"):
        ours.Revolver(*three, 5, 9, compression_params={"schema": "blosc"})
    levels = ours.MultiLevelRevolver(*three, 9, _one(ours, three, 2))
    with pytest.raises(ArgumentError, match=r"no parameters \['schema'\]"):
        levels.addNumpyStorage({"schema": "blosc"})
    with pytest.raises(ArgumentError, match="scheduler= is not supported"):
        ours.BaseRevolver(*three, 3, 9, scheduler=ours.pyrevolve.CRevolve(3, 9))
    revolver = ours.Revolver(*three, 3, 9)
    for call in (revolver.resetStorageList, revolver.addDiskStorage, revolver.addNumpyStorage):
        with pytest.raises(ArgumentError, match="chosen when it is made"):
            call()
    with pytest.raises(AttributeError):
        revolver.scheduler = ours.pyrevolve.CRevolve(3, 9)
    with pytest.raises(TypeError):
        ours.MemoryRevolver(*three, 3, 9, diskstorage=True)  # type: ignore[call-arg]

    class Own(ours.MemoryRevolver):
        def save_checkpoint(self, st_idx: int = 0) -> None:
            """Never called."""

    with pytest.raises(ArgumentError, match="save_checkpoint, which is never called"):
        Own(*three, 3, 9)


def test_costs_alone_choose_the_plan() -> None:
    problem = Problem()
    costs = Costs(1.0, 7.0, tape_step_s=1.0)
    revolver = ours.Revolver(*problem.operators(), 5, 60, costs=costs)
    assert np.array_equal(problem.gradient(revolver), store_all()[1])
    assert revolver.plan.costs.reverse_step_s == 7.0


def test_the_budget_error_names_the_state_and_the_buffers(tmp_path: Path) -> None:
    def refused(memory: int) -> str:
        problem = Problem()
        with (
            ours.Revolver(
                *problem.operators(), None, 60, memory=memory, tiers=f"file://{tmp_path}"
            ) as revolver,
            pytest.raises(BudgetError) as caught,
        ):
            revolver.apply_forward()
        assert problem.forward_steps == 0
        return str(caught.value)

    assert refused(100).endswith("I/O buffers; raise the budget")
    assert "the state alone would fit: make the buffers smaller" in refused(5000)
    problem = Problem()
    with ours.Revolver(  # as the message says
        *problem.operators(), None, 60, memory="3 slots", tiers=f"file://{tmp_path}?buffers=1MiB"
    ) as revolver:
        assert np.array_equal(problem.gradient(revolver), store_all()[1])
