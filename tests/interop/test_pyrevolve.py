"""pyrevolve's interface: programs written for it run unchanged, exactly, and beyond memory."""

from __future__ import annotations

import gc
import inspect
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from leaks import native_threads
from leaving import on_time

from multistage import native
from multistage.backends import codecs
from multistage.errors import ArgumentError, BudgetError, StateError, StoreError
from multistage.interop import pyrevolve as ours
from multistage.interop.pyrevolve import compression, storage
from multistage.measurement import chain
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.pieces import chain_plan
from multistage.planners.single.binomial import nu
from multistage.reversing import unequal, uniform
from multistage.reversing.first_sweep import GUESSED_STEP_S

NT = 60


class Problem:
    """x_{t+1} = sin(x_t) + 0.1 x_{t-1}: two time levels in a buffer that rotates.

    The state of step t are rows t mod 3 and (t - 1) mod 3.  The adjoint needs
    the rows as the forward operator leaves them.
    """

    def __init__(self, width: int = 40, dtype: Any = np.float64) -> None:
        self.u = np.zeros((3, width), dtype)
        self.v = np.zeros((2, width), dtype)
        self.start = np.linspace(0.1, 1.0, width).astype(dtype)
        self.dtype = np.dtype(dtype)
        self.size = 2 * width
        self.forward_steps = self.reverse_steps = 0
        self.saves: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.u[:] = np.nan
        self.u[0], self.u[2] = self.start, 0.5 * self.start
        self.v[0], self.v[1] = 1.0, 0.0

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def get_data(self, t: int) -> list[Any]:
        self.saves.append(t)
        return [self.u[t % 3], self.u[(t - 1) % 3]]

    def get_data_location(self, t: int) -> list[Any]:
        return [self.u[t % 3], self.u[(t - 1) % 3]]

    def forward(self, t_start: int, t_end: int) -> None:
        for t in range(t_start, t_end):
            self.u[(t + 1) % 3] = np.sin(self.u[t % 3]) + 0.1 * self.u[(t - 1) % 3]
            self.forward_steps += 1

    def backward(self, t_start: int, t_end: int) -> None:
        assert t_end == t_start + 1
        # Would be nan if the forward step before it had not run.
        assert not np.isnan(self.u[(t_start + 1) % 3]).any()
        later, earlier = self.v[0].copy(), self.v[1].copy()
        self.v[0] = np.cos(self.u[t_start % 3]) * later + earlier
        self.v[1] = 0.1 * later
        self.reverse_steps += 1

    def operators(self) -> tuple[Any, Any, Any]:
        def made(function: Callable[..., None]) -> Any:
            return type("Made", (ours.Operator,), {"apply": staticmethod(function)})()

        return self, made(self.forward), made(self.backward)

    def gradient(self, revolver: Any) -> Any:
        revolver.apply_forward()
        revolver.apply_reverse()
        return self.v.copy()


def store_all(nt: int = NT, **options: Any) -> tuple[Any, Any]:
    """The last state and the adjoint, without any checkpointing package."""
    problem = Problem(**options)
    rows = []
    for t in range(nt):
        rows.append(problem.u.copy())
        problem.forward(t, t + 1)
    last = problem.u.copy()
    for t in reversed(range(nt)):
        problem.u[:] = rows[t]
        problem.forward(t, t + 1)
        problem.backward(t, t + 1)
    return last, problem.v.copy()


LAST, EXACT = store_all()


def levels(problem: Problem, folder: Path) -> list[Any]:
    size, dtype = problem.size, problem.dtype
    return [
        storage.NumpyStorage(size, 3, dtype),
        storage.NumpyStorage(size, 5, dtype, wd=0.5, rd=0.5),
        storage.DiskStorage(size, 20, dtype, filedir=str(folder), wd=2, rd=2),
    ]


class Own(storage.Storage):
    """A storage of the user's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: dict[int, list[Any]] = {}
        self.saved = self.loaded = 0

    def save(self, key: int, data_pointers: Any) -> None:
        assert 0 <= key < self.n_ckp
        self.kept[key] = [array.copy() for array in data_pointers]
        self.saved += 1

    def load(self, key: int, locations: Any) -> None:
        for target, array in zip(locations, self.kept[key], strict=True):
            target[:] = array
        self.loaded += 1


MAKERS: dict[str, Callable[[Problem, Path], Any]] = {
    "memory": lambda p, f: ours.Revolver(*p.operators(), 5, NT),
    "adjusted": lambda p, f: ours.Revolver(*p.operators(), None, NT),
    "more than enough": lambda p, f: ours.MemoryRevolver(*p.operators(), NT + 9, NT),
    "one checkpoint": lambda p, f: ours.Revolver(*p.operators(), 1, NT),
    "disk": lambda p, f: ours.DiskRevolver(*p.operators(), 5, NT, filedir=str(f)),
    "levels": lambda p, f: ours.MultiLevelRevolver(*p.operators(), NT, levels(p, f)),
    "disk first": lambda p, f: ours.MultiLevelRevolver(
        *p.operators(), NT, [storage.DiskStorage(p.size, 6, p.dtype, filedir=str(f), wd=1, rd=1)]
    ),
    "storages of the user's own": lambda p, f: ours.MultiLevelRevolver(
        *p.operators(),
        NT,
        [Own(p.size, 3, p.dtype, wd=0.5, rd=0.5), Own(p.size, 20, p.dtype, wd=2, rd=2)],
    ),
    "numpy with costs first": lambda p, f: ours.MultiLevelRevolver(
        *p.operators(), NT, [levels(p, f)[1], Own(p.size, 1, p.dtype, wd=3, rd=3)]
    ),
    "compressed first": lambda p, f: ours.MultiLevelRevolver(
        *p.operators(),
        NT,
        [
            storage.BytesStorage(
                p.nbytes, 3, p.dtype, compression.init_compression({"scheme": None}), wd=1, rd=1
            ),
            *levels(p, f)[2:],
        ],
    ),
    "numpy with costs": lambda p, f: ours.MultiLevelRevolver(
        *p.operators(), NT, [storage.NumpyStorage(p.size, 6, p.dtype, wd=1, rd=1)], uf=2, ub=3
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_exact_and_again(name: str, tmp_path: Path) -> None:
    problem = Problem()
    with MAKERS[name](problem, tmp_path) as revolver:
        for _ in range(2):
            problem.reset()
            problem.forward_steps = problem.reverse_steps = 0
            revolver.apply_forward()
            assert problem.forward_steps == NT
            assert problem.reverse_steps == 0
            assert np.array_equal(problem.u, LAST)
            revolver.apply_reverse()
            assert problem.reverse_steps == NT
            assert np.array_equal(problem.v, EXACT)
        report = revolver.report()
        assert report.counts.reverse_steps == NT
        assert report.plan.makespan_s > 0
    assert not list(tmp_path.iterdir())


def test_checkpoints_on_disk_take_memory_for_those_on_their_way(tmp_path: Path) -> None:
    for n_checkpoints in (1, 20):
        problem = Problem()
        with ours.DiskRevolver(
            *problem.operators(), n_checkpoints, NT, filedir=str(tmp_path)
        ) as revolver:
            assert np.array_equal(problem.gradient(revolver), EXACT)
            assert revolver.plan.slots == 4 >= revolver.report().counts.peak_slots


def test_the_number_of_forward_steps_is_that_of_revolve() -> None:
    problem = Problem()
    revolver = ours.Revolver(*problem.operators(), 5, NT)
    problem.gradient(revolver)
    # One more right before each adjoint step.
    assert problem.forward_steps == nu(NT, 5) + NT
    assert revolver.plan.forward_steps == nu(NT, 5) + 1


@pytest.mark.parametrize("tiers", ["memory:", "file"])
def test_memory_and_tiers(tiers: str, tmp_path: Path) -> None:
    problem = Problem()
    where = f"file://{tmp_path}" if tiers == "file" else tiers
    costs = Costs(
        1.0, 1.0, tape_step_s=1.0, state_bytes=problem.nbytes, tiers=(Tier("t", 2.0, 2.0),)
    )
    with ours.Revolver(
        *problem.operators(), None, NT, memory="6 slots", tiers=where, costs=costs
    ) as revolver:
        assert np.array_equal(problem.gradient(revolver), EXACT)
        assert problem.forward_steps < 3 * NT
        problem.reset()
        assert np.array_equal(problem.gradient(revolver), EXACT)


def test_measured_costs_put_the_arrays_back(tmp_path: Path) -> None:
    problem = Problem()
    with ours.Revolver(
        *problem.operators(), None, NT, memory="9 MiB", tiers=f"file://{tmp_path}"
    ) as revolver:
        with pytest.raises(ArgumentError, match="first apply_forward"):
            revolver.plan  # noqa: B018
        assert np.array_equal(problem.gradient(revolver), EXACT)
        assert revolver.plan.n_steps == NT
        # Only one tape exists: no plan may keep two.
        assert revolver.plan.costs.tape_slots > 1e6
        assert "of these operators only one exists" in str(revolver.plan)


@pytest.mark.long(but="*-9 slots")
@pytest.mark.parametrize("memory", ["4 slots", "9 slots", "60 slots"])
@pytest.mark.parametrize(
    "tiers", [None, "memory:?buffers=0", "memory:?compress=auto&buffers=0", "memory:1MiB > memory:"]
)
def test_no_step_runs_to_be_measured(memory: str, tiers: str | None) -> None:
    """An operator that sums a misfit sees each step as often as under the plan that is given."""
    if "compress" in (tiers or ""):
        pytest.importorskip("blosc2")
    problem, planner = Problem(), "revolve" if tiers is None else "h-revolve"
    with ours.Revolver(
        *problem.operators(), None, NT, memory=memory, tiers=tiers, planner=planner
    ) as revolver:
        assert np.array_equal(problem.gradient(revolver), EXACT)
        plan, measured = revolver.plan, problem.forward_steps
        assert plan.costs.forward_step_s != GUESSED_STEP_S
    problem = Problem()
    with ours.Revolver(
        *problem.operators(), None, NT, memory=memory, tiers=tiers, planner=plan
    ) as revolver:
        assert np.array_equal(problem.gradient(revolver), EXACT)
    assert measured == problem.forward_steps


def test_costs_of_a_shot_serve_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, options = Problem(), {"memory": "9 slots", "tiers": "memory:?buffers=0"}
    with ours.Revolver(*problem.operators(), None, NT, **options) as revolver:
        assert np.array_equal(problem.gradient(revolver), EXACT)
        seen = revolver.report().seen
    monkeypatch.setattr(chain, "probe_store", None)
    monkeypatch.setattr(uniform, "measure", None)
    problem.reset()
    with ours.Revolver(*problem.operators(), None, NT, costs=seen, **options) as revolver:
        assert np.array_equal(problem.gradient(revolver), EXACT)


def test_an_error_in_the_first_steps_leaves_them_unmeasured() -> None:
    problem = Problem()
    checkpoint, forward, backward = problem.operators()
    apply, errors = forward.apply, [FloatingPointError()]

    def fails(*, t_start: int, t_end: int) -> None:
        if t_start == 1 and errors:
            raise errors.pop()
        apply(t_start=t_start, t_end=t_end)

    forward.apply = fails
    with ours.Revolver(checkpoint, forward, backward, None, NT, memory="9 slots") as revolver:
        with pytest.raises(FloatingPointError):
            revolver.apply_forward()
        with pytest.raises(ArgumentError, match="no step to report"):
            revolver.report()
        problem.reset()
        assert np.array_equal(problem.gradient(revolver), EXACT)
        assert revolver.plan.costs.forward_step_s != GUESSED_STEP_S


def test_levels_follow_their_costs(tmp_path: Path) -> None:
    problem = Problem()
    dear, cheap = levels(problem, tmp_path), levels(problem, tmp_path)
    cheap[2].wd = cheap[2].rd = 0.6
    with (
        ours.MultiLevelRevolver(*problem.operators(), NT, dear) as revolver,
        ours.MultiLevelRevolver(*problem.operators(), NT, cheap) as other,
    ):
        assert np.array_equal(problem.gradient(revolver), EXACT)
        assert len(revolver.report().tiers) == 2
        assert other.plan.makespan_s < revolver.plan.makespan_s
        problem.reset()
        assert np.array_equal(problem.gradient(other), EXACT)


def test_uf_and_ub_are_heeded(tmp_path: Path) -> None:
    def made(**costs: float) -> Any:
        problem = Problem()
        return ours.MultiLevelRevolver(*problem.operators(), NT, levels(problem, tmp_path), **costs)

    with made() as plain, made(ub=5.0) as slow, made(uf=10.0) as long:
        assert slow.plan.makespan_s == plain.plan.makespan_s + 4 * NT
        # Where a step costs ten transfers more states are kept.
        assert long.plan.forward_steps < plain.plan.forward_steps


def test_revolvers_share_the_keys_of_a_storage() -> None:
    first, second = Problem(), Problem(dtype=np.float32)
    shared = [Own(first.size, 60, first.dtype, wd=1, rd=1)]
    with ours.MultiLevelRevolver(*first.operators(), NT, shared) as revolver:
        for _ in range(2):
            first.reset()
            revolver.apply_forward()
            with ours.MultiLevelRevolver(*second.operators(), NT, shared) as other:
                other.apply_forward()
            revolver.apply_reverse()
            assert np.array_equal(first.v, EXACT)


def test_a_key_is_taken_before_a_storage_saves() -> None:
    """Another revolver, as of another thread, saves meanwhile."""
    first, second = Problem(), Problem(dtype=np.float32)
    other: Any = None
    saved: list[int] = []

    class Interrupted(Own):
        def save(self, key: int, data_pointers: Any) -> None:
            nonlocal other
            saved.append(key)
            if len(saved) == 4:
                other = ours.MultiLevelRevolver(*second.operators(), NT, shared)
                other.apply_forward()
            super().save(key, data_pointers)

    shared = [Interrupted(first.size, 60, first.dtype, wd=1, rd=1)]
    with ours.MultiLevelRevolver(*first.operators(), NT, shared) as revolver:
        assert np.array_equal(first.gradient(revolver), EXACT)
        other.apply_reverse()
        other.close()
    assert np.allclose(second.v, EXACT)


@pytest.mark.parametrize("scheme", compression.compressors_available)
def test_compression(scheme: str | None) -> None:
    problem = Problem()
    revolver = ours.Revolver(*problem.operators(), 5, NT, compression_params={"scheme": scheme})
    found = problem.gradient(revolver)
    if scheme == "zfp":
        assert np.allclose(found, EXACT, rtol=1e-3)
    else:
        assert np.array_equal(found, EXACT)


def test_custom_compression_gets_its_parameters() -> None:
    seen = []

    def compress(params: Any, array: Any) -> Any:
        seen.append(params["level"])
        return compression.compressors[None](params, array)

    problem = Problem()
    params = {
        "scheme": "custom",
        "compressor": compress,
        "decompressor": compression.decompressors[None],
        "level": 7,
    }
    revolver = ours.Revolver(*problem.operators(), 5, NT, compression_params=params)
    assert np.array_equal(problem.gradient(revolver), EXACT)
    assert set(seen) == {7}


@pytest.mark.parametrize("scheme", ["blosc", "zfp"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compressed_arrays_come_back(scheme: str, dtype: Any) -> None:
    if scheme not in compression.compressors_available:
        pytest.skip(f"{scheme} is not installed")
    compress, decompress = compression.init_compression({"scheme": scheme})
    field = np.sin(np.linspace(0, 9, 60000)).reshape(200, 300).astype(dtype)[:, ::2]
    packed = compress(field)
    assert sum(map(len, packed.parts)) < field.nbytes
    back = decompress(packed)
    assert back.dtype == field.dtype
    if scheme == "blosc":
        assert np.array_equal(back, field)
    else:
        assert np.allclose(back, field, atol=1e-6)


def test_the_default_number_of_checkpoints_is_that_of_pyrevolve() -> None:
    assert [ours.adjust(n) for n in (1, 2, 3, 6, 7, 20, 21, 70, 71)] == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    with pytest.raises(ArgumentError):
        ours.adjust(0)
    peer = pytest.importorskip("pyrevolve.crevolve")
    for n in [*range(2, 200), 1000, 5000]:
        assert ours.adjust(n) == peer.adjust(n)


# ------------------------------------------------------------------- faults


def test_an_operator_that_raises_can_be_run_again(tmp_path: Path) -> None:
    problem = Problem()
    checkpoint, forward, backward = problem.operators()
    calls = 0

    def failing(t_start: int, t_end: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise RuntimeError("blown up")
        problem.backward(t_start, t_end)

    backward = type("Made", (ours.Operator,), {"apply": staticmethod(failing)})()
    with ours.DiskRevolver(checkpoint, forward, backward, 5, NT, filedir=str(tmp_path)) as revolver:
        revolver.apply_forward()
        with pytest.raises(RuntimeError, match="blown up"):
            revolver.apply_reverse()
        assert not list(tmp_path.iterdir())
        with pytest.raises(ArgumentError, match="needs a forward"):
            revolver.apply_reverse()
        problem.reset()
        assert np.array_equal(problem.gradient(revolver), EXACT)


def test_nothing_is_left_of_a_forgotten_revolver(tmp_path: Path) -> None:
    def threads() -> int:
        return threading.active_count() + native_threads()

    before = threads()
    problem = Problem()
    revolver = ours.DiskRevolver(*problem.operators(), 5, NT, filedir=str(tmp_path))
    revolver.apply_forward()
    assert threads() > before
    del revolver
    gc.collect()
    assert threads() == before
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------- bad input


def _plain(*counts: Any, **options: Any) -> Callable[[Any], object]:
    return lambda three: ours.MemoryRevolver(*three, *counts, **options)


def _levels(*given: Any, **options: Any) -> Callable[[Any], object]:
    return lambda three: ours.MultiLevelRevolver(*three, NT, *given, **options)


def _storage(size: int = 2, **options: float) -> list[storage.Storage]:
    return [storage.NumpyStorage(1, size, "f8", **options)]


def _scheme(**params: Any) -> Callable[[Any], object]:
    def call(three: Any) -> object:
        pytest.importorskip(codecs.PACKAGES.get(params.get("scheme"), "numpy"))
        return ours.MemoryRevolver(*three, 5, NT, compression_params=params)

    return call


class Saving(ours.MemoryRevolver):
    def save_checkpoint(self, st_idx: int = 0) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((_plain(5, wrong), "n_steps|steps") for wrong in (0, -1, None, 2.5)),
        *((_plain(wrong, NT), "n_checkpoints=") for wrong in ("5", 2.5, True, -1, 0)),
        (lambda three: ours.Revolver(*three[:2], None, 5, NT), r"rev_operator=.* apply"),
        (lambda three: Saving(*three, 3, 9), "save_checkpoint, which is never called"),
        (_plain(5, NT, planner="best"), "planner 'best'"),
        (_plain(5, NT, memory="9 slots"), "n_checkpoints=5 and memory='9 slots'"),
        (
            lambda three: ours.DiskRevolver(*three, None, 9, filedir="there", tiers="memory:"),
            r"filedir=.*tiers='memory:'",
        ),
        (
            lambda three: ours.SingleLevelRevolver(
                *three, 5, NT, compression_params={"scheme": "blosc"}, diskstorage=True
            ),
            "memory alone",
        ),
        (_scheme(scheme="snappy"), "'snappy' is not known"),
        (_scheme(schema="blosc"), r"no parameters \['schema'\]"),
        (_scheme(scheme="blosc", chunksize=1), r"no parameters \['chunksize'\]"),
        (_scheme(scheme="zfp", tolerence=1), r"no parameters \['tolerence'\]"),
        (_scheme(scheme="zfp", tolerance=1, rate=8), "exclude each other"),
        (_scheme(scheme=None, tolerance=1), "it has none"),
        (_scheme(scheme="custom"), "needs a compressor and a decompressor"),
        (_levels(None), "storage_list"),
        (_levels([]), "storage_list"),
        (_levels(_storage(), uf=0), "uf=0"),
        (_levels(_storage(0)), "level 0 has size 0, wd=0.0"),
        (_levels(_storage(wd=-1.0)), "level 0 has size 2, wd=-1.0"),
        (_levels(_storage(wd=float("nan"))), "level 0 has size 2, wd=nan"),
        (lambda three: storage.DiskStorage(1, 2, "f8", keepfiles=True), "keepfiles"),
        (lambda three: _plain(None, NT, memory=8)(three).apply_forward(), "needed for one state"),
    ],
)
def test_bad_arguments(call: Callable[[Any], object], message: str) -> None:
    problem = Problem()
    with pytest.raises(ArgumentError, match=message):
        call(problem.operators())
    assert problem.forward_steps == 0


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        ours.DiskRevolver(*Problem().operators(), 5, NT, filedir=str(tmp_path / "file"))


def test_arrays_of_another_precision_are_not_rounded() -> None:
    # As in pyrevolve's example use_modernised.py, where copies are rounded.
    problem = Problem()
    problem.dtype = np.dtype(np.float32)
    revolver = ours.Revolver(*problem.operators(), 5, NT)
    for _ in range(2):
        problem.reset()
        assert np.array_equal(problem.gradient(revolver), EXACT)
    assert revolver.report().plan.costs.state_bytes == 2 * problem.nbytes


class Meshes:
    """Operators on a mesh that has another number of points, and dtype, after each time step."""

    dtype, size = np.float64, 40

    def __init__(self, seed: int, nt: int = 24) -> None:
        draw, self.nt = random.Random(seed), nt
        self.points = [draw.randint(1, 40) for _ in range(nt + 1)]
        self.dtypes = [draw.choice([np.float32, np.float64]) for _ in range(nt + 1)]
        self.start()
        self.seconds = [draw.uniform(1, 9) for _ in range(nt)]

    def start(self) -> None:
        self.u = np.sin(np.arange(self.points[0]) + 1.0).astype(self.dtypes[0])
        self.total = np.ones(self.points[-1])

    def costs(self, less: int = 0) -> StageCosts:
        sizes = [n * np.dtype(d).itemsize for n, d in zip(self.points, self.dtypes, strict=True)]
        stages = [
            Stage(f"{i}", s, 2 * s, size - less, size - less, 0)
            for i, (s, size) in enumerate(zip(self.seconds, sizes[1:], strict=True))
        ]
        return StageCosts(tuple(stages), sizes[0])

    def get_data(self, timestep: int) -> list[Any]:
        assert len(self.u) == self.points[timestep]
        return [self.u]

    def get_data_location(self, timestep: int) -> list[Any]:
        self.u = np.empty(self.points[timestep], self.dtypes[timestep])
        return [self.u]

    def forward(self, t_start: int, t_end: int) -> None:
        for i in range(t_start, t_end):
            self.before = self.u
            made = np.cos(np.resize(self.u, self.points[i + 1]) + i)
            self.u = made.astype(self.dtypes[i + 1])

    def backward(self, t_start: int, t_end: int) -> None:
        assert t_end == t_start + 1
        assert len(self.before) == self.points[t_start]
        self.total = np.resize(self.total, self.points[t_start]) * np.sin(self.before) + t_start

    def revolver(self, **options: Any) -> ours.Revolver:
        forward, backward = (
            SimpleNamespace(apply=self.forward),
            SimpleNamespace(apply=self.backward),
        )
        return ours.Revolver(self, forward, backward, options.pop("n", None), self.nt, **options)

    def exact(self) -> bytes:
        """Return the bytes of the gradient, every state being kept."""
        self.start()
        kept: list[Any] = []
        for i in range(self.nt):
            kept.append(self.u)
            self.forward(i, i + 1)
        for i in reversed(range(self.nt)):
            self.before = kept[i]
            self.backward(i, i + 1)
        return self.total.tobytes()

    def gradient(self, revolver: ours.Revolver) -> bytes:
        self.start()
        revolver.apply_forward()
        revolver.apply_reverse()
        return self.total.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_checkpoints_of_unequal_size(seed: int) -> None:
    meshes = Meshes(seed)
    expected = meshes.exact()
    options: dict[str, Any] = {"memory": 900} if seed % 2 else {"n": 3}
    with meshes.revolver(costs=meshes.costs(), **options) as revolver:
        assert [meshes.gradient(revolver) for _ in range(2)] == [expected] * 2
        counts = revolver.report().counts
        assert (
            counts.forward_steps + 24 == revolver.plan.forward_steps
        )  # those before adjoints, too


@pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
@pytest.mark.parametrize("where", ["memory:", "file:.?buffers=0", None])
@pytest.mark.parametrize("nt", [24, pytest.param(400, marks=pytest.mark.long)])
def test_checkpoints_of_unequal_size_stream_to_a_tier(
    where: str | None, nt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By given costs, and by those that a first sweep has surveyed; 400 are more than a table."""
    monkeypatch.chdir(tmp_path)
    fast = Tier.of_rates(1e9, 1e9, tapes=False)
    monkeypatch.setattr(unequal, "measured_rates", lambda *_: fast)
    meshes = Meshes(3, nt)
    expected, costs = meshes.exact(), meshes.costs()
    options: dict[str, Any] = {"memory": "3 slots", "tiers": where}
    if where is None:  # the folder of a DiskRevolver
        options = {"diskstorage": True, "n": 3}
    with meshes.revolver(costs=costs, **options) as revolver:
        assert meshes.gradient(revolver) == expected
        plan = revolver.plan
        assert plan.writes == revolver.report().counts.writes > 0
        assert meshes.gradient(revolver) == expected  # by the times that were seen
    memory = chain_plan(costs, 3 * costs.largest_state_bytes, "revolve")
    assert plan.makespan_s < 0.95 * memory.makespan_s
    with on_time(), meshes.revolver(planner="survey", **options) as revolver:
        assert meshes.gradient(revolver) == expected
        assert revolver.report().counts.writes == 0
        assert meshes.gradient(revolver) == expected
        assert revolver.report().counts.writes == revolver.plan.writes > 0
        assert meshes.gradient(revolver) == expected


@pytest.mark.parametrize("memory", ["3 slots", 900])
def test_a_survey_runs_no_step_before_its_sweep(memory: str | int) -> None:
    meshes = Meshes(2)
    expected, ran = meshes.exact(), []
    forward = meshes.forward

    def counted(t_start: int, t_end: int) -> None:
        ran.extend(range(t_start, t_end))
        forward(t_start, t_end)

    meshes.forward = counted  # type: ignore[method-assign]
    with meshes.revolver(memory=memory, planner="survey") as revolver:
        meshes.start()
        revolver.apply_forward()
        assert ran == list(range(24))
        revolver.apply_reverse()
        assert meshes.total.tobytes() == expected
        assert meshes.gradient(revolver) == expected
        # A state that is larger now ends the sweep, which begins again, from state 0.
        meshes.points[13] += 40
        expected = meshes.exact()
        ran.clear()
        assert meshes.gradient(revolver) == expected
        assert ran[:37] == [*range(13), *range(24)]
        assert meshes.gradient(revolver) == expected


def test_checkpoints_of_unequal_size_need_their_costs() -> None:
    meshes = Meshes(1)
    revolver = meshes.revolver(memory="3 slots")
    with revolver, pytest.raises(StateError, match="unless planner='survey'"):
        revolver.apply_forward()
    meshes.start()
    revolver = meshes.revolver(costs=meshes.costs(4), memory="3 slots")
    with revolver, pytest.raises(BudgetError, match=r"state 1 takes \d+ bytes, its costs say"):
        revolver.apply_forward()


def test_a_location_of_another_size_is_named() -> None:
    class Wrong(Meshes):
        def get_data_location(self, timestep: int) -> list[Any]:
            return [np.empty(41)]

    meshes = Wrong(2)
    with meshes.revolver(costs=meshes.costs(), memory="3 slots") as revolver:
        revolver.apply_forward()
        with pytest.raises(StateError, match=r"get_data_location\(\d+\) returned arrays \(41,\)"):
            revolver.apply_reverse()


def test_arrays_that_change_are_named() -> None:
    problem = Problem()
    problem.get_data = lambda t: [problem.u[0]] * (1 + (t > 20))  # type: ignore[method-assign]
    with pytest.raises(StateError, match=r"get_data\(\d+\) returned arrays \(40,\) float64, \("):
        ours.Revolver(*problem.operators(), 5, NT).apply_forward()

    problem = Problem()
    read_only = problem.u.copy()
    read_only.flags.writeable = False
    problem.get_data_location = lambda t: [read_only[0], read_only[1]]  # type: ignore[method-assign]
    revolver = ours.Revolver(*problem.operators(), 5, NT)
    revolver.apply_forward()
    with pytest.raises(StateError, match="read-only"):
        revolver.apply_reverse()

    problem = Problem()
    problem.get_data = lambda t: [[0.0]]  # type: ignore[method-assign]
    with pytest.raises(StateError, match="array 0 of get_data\\(0\\) is list"):
        ours.Revolver(*problem.operators(), 5, NT).apply_forward()


# ------------------------------------------------------ beside pyrevolve itself


@pytest.mark.filterwarnings("ignore")  # theirs, at import
@pytest.mark.parametrize(
    "name",
    ["Revolver", "MemoryRevolver", "DiskRevolver", "SingleLevelRevolver", "MultiLevelRevolver"],
)
def test_parameters_come_in_the_same_order(name: str) -> None:
    peer = pytest.importorskip("pyrevolve")
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


@pytest.mark.long(but=("by name", "disk", "levels"))
@pytest.mark.filterwarnings("ignore")  # theirs, at import
@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_those_of_pyrevolve(call: str, tmp_path: Path) -> None:
    peer, folder = pytest.importorskip("pyrevolve"), f"{tmp_path}/"
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


# ------------------------------------------------------------------- install


def test_install_serves_later_imports(tmp_path: Path) -> None:
    program = f"""
import sys
from multistage import Costs, Tier
from multistage.interop.pyrevolve import install, uninstall
costs = Costs(1.0, 1.0, tape_step_s=1.0, tiers=(Tier("file", 2.0, 2.0),))
install(memory="3 slots", tiers="file://{tmp_path}", planner="streaming", costs=costs)
from pyrevolve import Checkpoint, Operator, Revolver
from pyrevolve.storage import DiskStorage
from pyrevolve.compression import init_compression
import pyrevolve
assert pyrevolve.__name__ == "multistage.interop.pyrevolve"
sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
import test_pyrevolve as t
problem = t.Problem()
revolver = Revolver(*problem.operators(), None, t.NT)
assert (problem.gradient(revolver) == t.EXACT).all()
assert revolver.plan.planner == "streaming" and revolver.plan.writes > 0
given = Revolver(*problem.operators(), 4, t.NT)
assert given.plan.planner == "revolve"
uninstall()
assert "pyrevolve" not in sys.modules
assert Revolver(*problem.operators(), None, t.NT).plan.planner == "revolve"
sys.modules["devito"] = sys
try:
    install()
except ValueError as error:
    assert "devito was imported before" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_profiler_counts_operators_and_copies(tmp_path: Path) -> None:
    problem, profiler = Problem(), ours.Profiler()
    revolver = ours.Revolver(*problem.operators(), 5, NT, profiler=profiler)
    problem.gradient(revolver)
    counts = profiler.counts
    assert counts["forward"]["lastfw"] == 1
    # An adjoint step and the forward step before it are one entry each.
    assert counts["reverse"]["reverse"] == NT + NT - 1
    assert counts["storage"]["copy_save"] >= len(problem.saves)
    assert all(ms > 0 for section in profiler.timings.values() for ms in section.values())
