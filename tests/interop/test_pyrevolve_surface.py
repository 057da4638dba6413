"""Change the import and nothing else: pyrevolve's calls and gradients, beside its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pyrevolve import Problem, store_all

from multistage.errors import ArgumentError, BudgetError
from multistage.interop import pyrevolve as ours
from multistage.model.costs import Costs

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, at import
peer = pytest.importorskip("pyrevolve")


@pytest.mark.parametrize(
    "name",
    ["Revolver", "MemoryRevolver", "DiskRevolver", "SingleLevelRevolver", "MultiLevelRevolver"],
)
def test_parameters_come_in_the_same_order(name: str) -> None:
    theirs = list(inspect.signature(getattr(peer, name)).parameters)
    here = list(inspect.signature(getattr(ours, name)).parameters)
    assert here[: len(theirs)] == theirs


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
}


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
