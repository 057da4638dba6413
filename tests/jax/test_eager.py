"""`multistage.jax.scan` outside of `jit`: the gradient of `lax.scan`, driven by a `Reversal`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - after the skip

import multistage.jax as mjax  # noqa: E402
from multistage.backends import MemoryStore  # noqa: E402
from multistage.backends.testing import FaultyStore  # noqa: E402
from multistage.errors import ArgumentError, BudgetError, StoreError  # noqa: E402
from multistage.jax import eager  # noqa: E402
from multistage.planners import PLANNERS  # noqa: E402
from multistage.report import Report  # noqa: E402
from tests.leaks import no_leak as no_leak  # noqa: E402

NOISE = np.random.default_rng(0)
N = 53
W = jnp.asarray(NOISE.normal(size=(6, 6)) / 3, jnp.float32)
XS = jnp.asarray(NOISE.normal(size=(N, 6)), jnp.float32)
C0 = jnp.asarray(NOISE.normal(size=6), jnp.float32)


def ours(memory="5 slots", tiers=None, **options):
    return partial(mjax.scan, memory=memory, tiers=tiers, **options)


def loss(scan, w, c, xs, **options):
    last, ys = scan(lambda c, x: (jnp.sin(w @ c + x), (c * x).sum()), c, xs, **options)
    return last.sum() + (ys**2).sum()


def gradient(scan, **options):
    return jax.grad(partial(loss, scan, **options), argnums=(0, 1, 2))


def same(one, other):
    one, other = map(jax.tree.leaves, (one, other))
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.weak_type, a.shape) == (b.dtype, b.weak_type, b.shape)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def of_tokens(scan, c, xs):
    """Keys, integers and a y that is a key."""

    def step(carry, x):
        key, h, i = carry
        key, sub = jax.random.split(key)
        h = jax.nn.relu(h * jax.random.bernoulli(sub, 0.9, h.shape) + x)
        return (key, h, i + 1), (sub, h.sum(), i)

    (_, h, _), (_, y, _) = scan(step, (jax.random.key(3), c, 0), xs)
    return h.sum() + y.sum()


def in_itself(scan, c):
    def step(c, _):
        last, _ = mjax.scan(
            lambda c, x: (jnp.sin(W @ c + x), None), c, XS[:7], memory="3 slots", tiers="memory:"
        )
        return last, last.sum()

    return scan(step, c, None, length=9)[1].sum()


def powers(scan, w, xs=None, **options):
    return scan(lambda c, x: (w * c, c.sum()), C0, xs, **options)


def twice(scan, w, c, xs, part):
    """Use what is closed over in several places of a step, and a part of what the loop returns."""

    def step(c, x):
        h = jnp.sin(w @ c + x)
        return h * jnp.cos(w @ h + x), (c * x).sum()

    last, ys = scan(step, c, xs)
    return (last.sum(), (ys**2).sum())[part]


CASES = {
    "a part of the results": lambda scan: [
        jax.grad(partial(twice, scan, part=part), argnums=argnums)(W, C0, XS)
        for part in (0, 1)
        for argnums in ((0, 1, 2), 1)
    ],
    "arrays": lambda scan: gradient(scan)(W, C0, XS),
    "reverse": lambda scan: gradient(scan, reverse=True)(W, C0, XS),
    "values": lambda scan: jax.value_and_grad(partial(loss, scan))(W, C0, XS),
    "no gradient": lambda scan: powers(scan, W[0, 0], length=2100),
    "two loops": lambda scan: jax.grad(
        lambda w: loss(scan, w, C0, XS) * loss(scan, w, C0, XS) + loss(scan, w, C0, XS[:9])
    )(W),
    "keys and integers": lambda scan: jax.grad(partial(of_tokens, scan), argnums=(0, 1))(C0, XS),
    "bfloat16": lambda scan: gradient(scan)(*(a.astype(jnp.bfloat16) for a in (W, C0, XS))),
    "complex": lambda scan: jax.grad(
        lambda w: abs(scan(lambda c, x: (jnp.sin(w * c + x), None), 1j * C0, XS)[0].sum())
    )(1.1 + 0.2j),
    "no carry": lambda scan: jax.grad(lambda w: scan(lambda c, x: ((), w * x), (), XS)[1].sum())(
        2.0
    ),
    "no steps": lambda scan: jax.value_and_grad(lambda w: powers(scan, w, XS[:0])[0].sum())(2.0),
    "weak type": lambda scan: jax.value_and_grad(
        lambda w: scan(lambda c, x: (c * w, c), 1.0, length=9), has_aux=True
    )(1.1),
    "of NumPy": lambda scan: jax.grad(
        lambda w: scan(lambda c, x: (c * w + x, c), np.float32(2), np.ones(9, np.float32))[0]
    )(1.1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_lax_scan_to_the_last_bit(case):
    same(CASES[case](ours()), CASES[case](jax.lax.scan))


TIERS = (None, "memory:", "file:.", "memory:8KiB > file:.", "fsspec:memory://eager")


@pytest.mark.long(but=["auto-*", "*-file*"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("planner", ["auto", *PLANNERS])
def test_bits_do_not_depend_on_planner_and_tier(planner, tiers, tmp_path, monkeypatch):
    if tiers is not None and "fsspec" in tiers:
        pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    run = gradient(ours("3 slots", tiers, planner=planner))
    expected = gradient(jax.lax.scan)(W, C0, XS)
    try:
        found = run(W, C0, XS)
    except (ArgumentError, BudgetError) as error:
        assert planner in str(error) or "slots" in str(error)  # it is for other tiers or budgets
        return
    same(found, expected)
    assert planner in ("auto", mjax.last_report().plan.planner)
    same(run(W, C0, XS), expected)  # with the costs that were seen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long(but=["1 slots", "8 KiB"])
@pytest.mark.parametrize("memory", ["1 slots", "7 slots", "20 slots", f"{N} slots", 900, "8 KiB"])
def test_bits_do_not_depend_on_the_budget(memory):
    same(gradient(ours(memory))(W, C0, XS), gradient(jax.lax.scan)(W, C0, XS))


def test_64_bits_and_a_pullback_outside_of_their_context():
    with jax.enable_x64(True):
        args = [jnp.asarray(a, jnp.float64) for a in (W, C0, XS)]
        pulls = [jax.vjp(partial(loss, scan), *args)[1] for scan in (ours(), jax.lax.scan)]
        one = jnp.float64(1)
        expected = pulls[1](one)
    for a, b in zip(pulls[0](one), expected, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=1e-12)  # XLA may round otherwise here


def newton(scan, x, **options):
    def step(h, _):
        h = (h + x / h) / 2
        return h, h.sum()

    last, ys = scan(step, x, **options)
    return last.sum() + (ys**2).sum(), ys


def near(x, h):
    return (abs(h * h - x) < 1e-4 * x).all()


@pytest.mark.parametrize("tiers", [None, "memory:?buffers=16KiB"])
@pytest.mark.parametrize("memory", ["1 slots", "3 slots", "64 KiB"])
def test_until_gives_what_the_length_does_that_it_finds(memory, tiers):
    for scale in (2.0, 1e8):  # the second needs more rows for ys than there are at first
        x = scale * jnp.arange(1.0, 4.0)
        found = jax.value_and_grad(
            partial(newton, ours(memory, tiers), until=partial(near, x)), has_aux=True
        )(x)
        n = len(found[0][1])
        assert n > 3
        grad = jax.value_and_grad(partial(newton, jax.lax.scan, length=n), has_aux=True)
        same(found, grad(x))
        assert mjax.last_report().complete


def test_until_may_close_over_what_there_is_a_gradient_by_and_ends_with_xs():
    def total(scan, w, **options):
        step = lambda c, x: (c * w + x, c)  # noqa: E731
        return scan(step, w, XS[:, 0], **options)[1].sum()

    for limit, n in ((1e-3, 1), (1e9, N)):
        found = jax.value_and_grad(
            lambda w, limit=limit: total(ours(), w, until=lambda c: abs(c) * w > limit * w)
        )(jnp.float32(0.9))
        same(
            found,
            jax.value_and_grad(
                lambda w, n=n: jax.lax.scan(lambda c, x: (c * w + x, c), w, XS[:n, 0])[1].sum()
            )(jnp.float32(0.9)),
        )
    ys = ours()(lambda c, x: (c + 1, c), 0, XS, until=lambda c: c == 5)[1]
    assert ys.tolist() == [0, 1, 2, 3, 4]


COMPILED_ONCE = {
    "at first": lambda scan, c: jax.grad(partial(of_tokens, scan))(c, XS),
    "on a device": lambda scan, c: jax.grad(partial(loss, scan, W))(
        c, jax.device_put(XS, jax.devices()[0])
    ),
    "in itself": lambda scan, c: jax.grad(partial(in_itself, scan))(c),
}


@pytest.mark.parametrize("case", COMPILED_ONCE)
def test_loops_with_one_jaxpr_are_compiled_once(case):
    eager._programs.clear()
    compiled = []

    def heard(event, _duration, **_):
        compiled.append(event)

    for scale in (1.0, 2.0, 3.0):
        COMPILED_ONCE[case](ours("3 slots", "memory:", planner="streaming"), scale * C0)
        mjax.clear()
        if scale == 1.0:
            jax.monitoring.register_event_duration_secs_listener(heard)
    jax.monitoring.unregister_event_duration_listener(heard)
    assert not [event for event in compiled if "backend_compile" in event]
    (program,) = eager._programs.values()
    assert program.costs


def test_calls_leave_no_objects_behind():
    def call():
        jax.grad(lambda c: loss(ours("3 slots"), W, c, XS))(C0)

    def objects():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        call()
    before = objects()
    for _ in range(40):
        call()
    assert objects() - before < 40


def test_loops_that_differ_in_a_constant_are_not_taken_for_one():
    table = [np.arange(4.0, dtype=np.float32), np.ones(4, np.float32)]

    def total(scan, k, w):
        inner = jax.jit(lambda c: c * table[k])
        return scan(lambda c, x: (inner(c) * w, None), jnp.ones(4), length=3)[0].sum()

    def signed(scan, zero, w):
        return scan(lambda c, x: (jnp.copysign(c, zero) * w, None), 1.0, length=3)[0]

    scans = ours(), jax.lax.scan
    for k in (0, 1):
        same(*(jax.grad(partial(total, scan, k))(2.0) for scan in scans))
    table[1] *= 3  # in place
    same(*(jax.grad(partial(total, scan, 1))(2.0) for scan in scans))
    for zero in (0.0, -0.0):
        same(*(jax.value_and_grad(partial(signed, scan, zero))(2.0) for scan in scans))


def test_the_report_is_that_of_the_loop_that_ended_last():
    gradient(ours("4 slots", "memory:"))(W, C0, XS)
    told = mjax.last_report()
    assert isinstance(told, Report)
    assert (told.n_steps, told.complete) == (14, True)
    jax.block_until_ready(jax.jit(gradient(ours("4 slots", "memory:")))(W, C0, XS))
    assert isinstance(mjax.last_report(), mjax.LoopReport)
    gradient(ours("4 slots", "memory:"))(W, C0, XS)
    assert isinstance(mjax.last_report(), Report)
    mjax.clear()


FAULTS = {
    "refused": {"refuse": lambda k: k % 2 == 0},
    "not written": {"lose_write": lambda k: k % 3 == 0},
    "not read": {"lose_read": lambda k: True},
}


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("faults", FAULTS)
def test_states_that_a_tier_loses_are_made_again(faults):
    store = FaultyStore(MemoryStore(), **FAULTS[faults])
    run = gradient(ours("2 slots", store, planner="streaming"))
    same(run(W, C0, XS), gradient(jax.lax.scan)(W, C0, XS))
    assert store.puts


class Interrupted(FaultyStore):
    """Raises KeyboardInterrupt in a transfer."""

    def __init__(self, method):
        super().__init__(MemoryStore())
        self.method = method

    def put(self, key, arrays, *, block=False):
        if self.method == "put":
            raise KeyboardInterrupt
        return super().put(key, arrays, block=block)

    def get(self, key):
        if self.method == "get":
            raise KeyboardInterrupt
        return super().get(key)


@pytest.mark.parametrize("method", ["put", "get"])
def test_after_ctrl_c_nothing_is_left_and_the_next_run_works(method):
    store = Interrupted(method)
    run = gradient(ours("2 slots", store, planner="streaming"))
    with pytest.raises(KeyboardInterrupt):
        run(W, C0, XS)
    store.method = ""
    same(run(W, C0, XS), gradient(jax.lax.scan)(W, C0, XS))


def test_a_pullback_that_is_never_called_holds_nothing(tmp_path):
    pull = jax.vjp(partial(loss, ours("2 slots", tmp_path)), W, C0, XS)[1]
    del pull
    gc.collect()  # `no_leak` looks for files and threads


def test_a_pullback_may_be_called_again(tmp_path):
    pull, expected = (
        jax.vjp(partial(powers, scan, xs=XS), W[0])[1]
        for scan in (ours("2 slots", tmp_path), jax.lax.scan)
    )
    for cotangent in 3 * [(C0, XS[:, 0])]:
        same(pull(cotangent), expected(cotangent))


def test_a_pullback_may_be_called_by_several_threads_at_once(tmp_path):
    pull, expected = (
        jax.vjp(partial(loss, scan), W, C0, XS)[1]
        for scan in (ours("2 slots", tmp_path), jax.lax.scan)
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(pull, [1.0] * 12))
    for one in found:
        same(one, expected(1.0))


def test_a_store_serves_one_loop_at_a_time():
    scan = ours("2 slots", MemoryStore())
    with pytest.raises(StoreError, match="holds"):
        jax.grad(lambda w: loss(scan, w, C0, XS) + loss(scan, w, C0, XS))(W)
    gc.collect()


def run_on(scan, **options):
    return scan(lambda c, x: (jnp.sin(c), None), C0, length=9, **options)[0].sum()


def pulled(turn):
    pull = jax.vjp(lambda c: ours()(lambda c, x: (jnp.sin(c), None), c, length=9)[0], C0)[1]
    return turn(pull)


INSIDE = "call multistage.jax.scan outside of jit"
REFUSED = {
    "until inside of jit": (
        lambda: jax.jit(lambda: run_on(ours(tiers="memory:"), until=lambda c: True))(),
        INSIDE,
    ),
    "a planner inside of jit": (
        lambda: jax.jit(lambda c: loss(ours(tiers="memory:", planner="revolve"), W, c, XS))(C0),
        INSIDE,
    ),
    "progress inside of jit": (
        lambda: jax.jit(lambda c: loss(ours(tiers="memory:", progress=True), W, c, XS))(C0),
        INSIDE,
    ),
    "no tier under vmap": (
        lambda: jax.vmap(lambda c: loss(ours(), W, c, XS))(C0[None]),
        "tiers= is needed",
    ),
    "several tiers inside of jit": (
        lambda: jax.jit(lambda c: loss(ours(tiers=["memory:", "file:."]), W, c, XS))(C0),
        "cannot be used inside|must be a string",
    ),
    "jacrev": (lambda: pulled(lambda pull: jax.vmap(pull)(jnp.eye(6))), "inside jax.jit"),
    "jit of a pullback": (lambda: pulled(lambda pull: jax.jit(pull)(C0)), "inside jax.jit"),
    "a planner that is not known": (
        lambda: gradient(ours(planner="best"))(W, C0, XS),
        "'best' is not known",
    ),
    "until of an array": (lambda: run_on(ours(), until=lambda c: c > 0), r"shape \(6,\)"),
    "until and reverse": (lambda: run_on(ours(), until=lambda c: True, reverse=True), "flip xs"),
    "a second derivative without a tier": (
        lambda: jax.hessian(lambda w: loss(ours(), w, C0, XS))(W),
        "first derivatives",
    ),
    "a gradient of a gradient": (
        lambda: jax.grad(lambda c: jax.grad(lambda c: loss(ours(), W, c, XS))(c).sum())(C0),
        "first derivatives",
    ),
    "another second derivative": (
        lambda: jax.hessian(lambda w: loss(ours(tiers="memory:"), w, C0, XS))(W),
        "first derivatives",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, told = REFUSED[case]
    with pytest.raises(ArgumentError, match=told):
        call()
    gc.collect()
    mjax.clear()


SMALL = (None, "memory:", "file:.", "memory:8KiB > file:.", "memory: + file:.")


def test_no_slot_is_refused():
    with pytest.raises(BudgetError, match="0 slots < 1 slot"):
        gradient(ours("0 slots"))(W, C0, XS)


@pytest.mark.parametrize("tiers", SMALL)
def test_no_room_names_the_least_and_buffers_of_tiers_shrink_with_the_budget(
    tiers, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BudgetError, match="100 bytes < ") as caught:
        gradient(ours(100, tiers))(W, C0, XS)
    least = caught.value.least_bytes
    assert least < 256 << 10
    expected = gradient(jax.lax.scan)(W, C0, XS)
    for memory in (least, "256 KiB", "1 MiB"):
        same(gradient(ours(memory, tiers))(W, C0, XS), expected)


def test_under_vmap_and_checkpoint_the_loop_runs_as_in_a_program():
    many = jnp.stack([C0, 2 * C0])
    scans = ours(tiers="memory:"), jax.lax.scan
    same(*(jax.vmap(gradient(scan), (None, 0, None))(W, many, XS) for scan in scans))
    same(*(jax.grad(jax.checkpoint(partial(loss, scan)))(W, C0, XS) for scan in scans))
    mjax.clear()


def test_without_the_c_core_loops_run_from_python_alone():
    program = """
import jax, jax.numpy as jnp, multistage.jax as mjax
def loss(scan, c):
    return scan(lambda c, x: (jnp.sin(c), None), c, length=40)[0].sum()
ours = lambda *args, **options: mjax.scan(*args, memory="3 slots", tiers="memory:", **options)
found, expected = (jax.grad(lambda c: loss(scan, c))(jnp.ones(3)) for scan in (ours, jax.lax.scan))
assert (found == expected).all()
print(mjax.last_report().n_steps)
jax.jit(lambda c: loss(ours, c))(jnp.ones(3))
"""
    environment = {**os.environ, "MULTISTAGE_CORE": "off"}
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert made.stdout == "14\n"
    assert "scan inside jit needs the C core" in made.stderr and "call it outside" in made.stderr
