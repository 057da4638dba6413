"""`multistage.jax.scan` beside `jax.lax.scan`: the same gradient, whatever is kept where."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - after the skip

import multistage.jax as mjax  # noqa: E402
from multistage import native  # noqa: E402
from multistage.errors import ArgumentError, BudgetError, StoreError  # noqa: E402
from multistage.jax.pullbacks import stop_of  # noqa: E402

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="needs the C core")

HOOKS: list[object] = []
NOISE = np.random.default_rng(0)
N = 53
W = jnp.asarray(NOISE.normal(size=(6, 6)) / 3, jnp.float32)
XS = jnp.asarray(NOISE.normal(size=(N, 6)), jnp.float32)
C0 = jnp.asarray(NOISE.normal(size=6), jnp.float32)
PLACED = jax.sharding.NamedSharding(
    jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,)),
    jax.sharding.PartitionSpec("d"),
)
SHARDED = jax.sharding.NamedSharding(
    jax.sharding.AbstractMesh((2,), ("d",)), jax.sharding.PartitionSpec("d")
)


@pytest.fixture(autouse=True)
def _nothing_open():
    native.library().ms_loop_clear()
    yield
    native.library().ms_loop_hooks(native.Transfer(), native.Transfer())
    native.library().ms_loop_clear()


def ours(memory="5 slots", tiers="memory:"):
    return partial(mjax.scan, memory=memory, tiers=tiers)


def loss(scan, w, c, xs, **options):
    last, ys = scan(lambda c, x: (jnp.sin(w @ c + x), (c * x).sum()), c, xs, **options)
    return last.sum() + (ys**2).sum()


def gradient(scan, **options):
    return jax.grad(partial(loss, scan, **options), argnums=(0, 1, 2))


def of_tokens(scan, c, xs):
    """Keys, integers and a y that is a key."""

    def step(carry, x):
        key, h, i = carry
        key, sub = jax.random.split(key)
        h = h * jax.random.bernoulli(sub, 0.9, h.shape) + x
        return (key, h, i + 1), (sub, h.sum(), i)

    (_, h, _), (_, y, _) = scan(step, (jax.random.key(3), c, 0), xs)
    return h.sum() + y.sum()


def in_outer(scan, w, c):
    def step(c, _):
        last, _ = scan(lambda c, x: (jnp.sin(w @ c + x), None), c, XS)
        return last, last.sum()

    return jax.lax.scan(step, c, None, length=7)[1].sum()


def in_itself(scan, c):
    def step(c, _):
        last, _ = scan(lambda c, x: (jnp.sin(W @ c + x), None), c, XS[:11])
        return last, last.sum()

    return scan(step, c, None, length=9)[1].sum()


def gradient_of_sums(scan, c):
    def step(c, x):
        return jnp.sin(c + jax.lax.pmean(c, "batch") + x), c.sum()

    return jax.grad(lambda c: scan(step, c, XS)[1].sum())(c)


def mutating(ref):
    def step(c, x):
        ref[...] = c
        return c + x, None

    return ours()(step, C0, XS)


def twice(scan, w, c, xs, part):
    """Use what is closed over in several places of a step, and a part of what the loop returns."""

    def step(c, x):
        h = jnp.sin(w @ c + x)
        return h * jnp.cos(w @ h + x), (c * x).sum()

    last, ys = scan(step, c, xs)
    return (last.sum(), (ys**2).sum())[part]


def in_a_branch(scan, branches):
    """Return gradients of a batch whose members take other branches."""

    def run(branch, c):
        def others(c):
            return jnp.cos(c).sum()

        return jax.lax.switch(branch, [others, lambda c: loss(scan, W, c, XS), others], c)

    many = jnp.stack([C0, 2 * C0, 3 * C0, C0])
    return jax.jit(jax.vmap(jax.grad(run, argnums=1)))(jnp.asarray(branches), many)


def in_two_branches(scan, branches, twice):
    """Return gradients of a batch whose members take branches that have a loop each."""
    once = jax.jit(partial(loss, scan, W, xs=XS))

    def run(branch, c):
        def another(c):
            last, ys = scan(lambda c, x: (jnp.tanh(x - W @ c), (c + x).sum()), c, XS[::2])
            return (last * ys[3]).sum() + ys.sum()

        def lookup(c):
            return c[(c.sum() * 1e6).astype(jnp.int32) % 6] ** 2

        def again(c):
            return once(2 * c)

        return jax.lax.switch(branch, [once, again if twice else another, lookup], c)

    many = jnp.stack([C0, 2 * C0, 3 * C0, C0])
    return jax.jit(jax.vmap(jax.grad(run, argnums=1)))(jnp.asarray(branches), many)


def donated():
    array = jnp.ones(3)
    array.delete()
    return array


def powers(scan, w, **options):
    return scan(lambda c, x: (w * c, c.sum()), C0, **options)


CASES = {
    "jit": lambda scan: jax.jit(gradient(scan))(W, C0, XS),
    "reverse": lambda scan: jax.jit(gradient(scan, reverse=True))(W, C0, XS),
    "vmap": lambda scan: jax.jit(jax.vmap(gradient(scan), (None, 0, None)))(
        W, jnp.stack([C0, 2 * C0, 3 * C0]), XS
    ),
    "vmap of vmap": lambda scan: jax.jit(
        jax.vmap(jax.vmap(gradient(scan), (None, 0, None)), (0, None, None))
    )(jnp.stack([W, W / 2]), jnp.stack([C0, 2 * C0, 3 * C0]), XS),
    "jacrev": lambda scan: jax.jit(jax.jacrev(lambda c: scan(step_of(W), c, XS)[0]))(C0),
    "checkpoint": lambda scan: jax.jit(jax.grad(jax.checkpoint(partial(loss, scan))))(W, C0, XS),
    "two loops": lambda scan: jax.jit(
        jax.grad(
            lambda w: loss(scan, w, C0, XS) * loss(scan, w, C0, XS) + loss(scan, w, C0, XS[:9])
        )
    )(W),
    "in an outer loop": lambda scan: jax.jit(jax.grad(partial(in_outer, scan)))(W, C0),
    "in itself": lambda scan: jax.jit(jax.grad(partial(in_itself, scan)))(C0),
    "keys and integers": lambda scan: jax.jit(jax.grad(partial(of_tokens, scan), argnums=(0, 1)))(
        C0, XS
    ),
    "bfloat16": lambda scan: jax.jit(gradient(scan))(
        *(a.astype(jnp.bfloat16) for a in (W, C0, XS))
    ),
    "complex": lambda scan: jax.jit(
        jax.grad(lambda w: abs(scan(step_of(w), C0.astype(complex), XS.astype(complex))[0].sum()))
    )(W.astype(complex)),
    "no carry": lambda scan: jax.jit(
        jax.grad(lambda w: scan(lambda c, x: ((), w * x), (), XS)[1].sum())
    )(2.0),
    "no steps": lambda scan: jax.jit(
        jax.value_and_grad(lambda w: powers(scan, w, xs=XS[:0])[0].sum())
    )(2.0),
    "weak type": lambda scan: jax.jit(
        jax.value_and_grad(lambda w: scan(lambda c, x: (c * w, c), 1.0, length=9), has_aux=True)
    )(1.1),
    "weak inputs": lambda scan: jax.jit(
        lambda x: scan(lambda c, x: (c * x, (x, 2 * x)), C0.astype(jnp.bfloat16), x)
    )(jnp.full(9, 1.5)),
    "weak type of no steps": lambda scan: jax.jit(
        lambda c: scan(lambda c, x: (2 * c, (c, 1)), c, XS[:0])
    )(2.0),
    "weak type beside a shorter one": lambda scan: jax.jit(
        jax.value_and_grad(
            lambda x: scan(lambda c, x: (c * x, c * x), 1.0, x)[1].sum().astype(jnp.float32)
        )
    )(XS[:, 0].astype(jnp.bfloat16)),
    "weak type that stays": lambda scan: jax.jit(
        lambda x: scan(lambda c, x: (c + 1.0, c * x), 0.0, x)
    )(XS[:, 0].astype(jnp.bfloat16)),
    "weak integer that becomes a float": lambda scan: jax.jit(
        jax.grad(lambda x: scan(lambda c, x: (c * 0.5 + x, c), 0, x)[1].sum())
    )(XS[:, 0]),
    "numbers of Python": lambda scan: jax.jit(
        lambda x: scan(lambda c, x: (c * x, (1.0, 2, True)), C0, x)
    )(XS),
    "named axis": lambda scan: jax.jit(
        jax.vmap(partial(gradient_of_sums, scan), axis_name="batch")
    )(jnp.stack([C0, 2 * C0, 3 * C0])),
    "a part of the results": lambda scan: [
        jax.jit(jax.grad(partial(twice, scan, part=part), argnums=(0, 1)))(W, C0, XS)
        for part in (0, 1)
    ],
    "no gradient": lambda scan: jax.jit(lambda w: powers(scan, w, length=9))(1.1),
}


def step_of(w):
    return lambda c, x: (jnp.sin(w @ c + x), None)


def same(one, other):
    one, other = (jax.tree.leaves(jax.block_until_ready(tree)) for tree in (one, other))
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.long(but=["jit", "vmap", "keys*", "in an outer*", "no *"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_lax_scan_to_the_last_bit(case):
    same(CASES[case](ours()), CASES[case](jax.lax.scan))


@pytest.mark.long(but=["1 slots-file*", "8 KiB-memory*"])
@pytest.mark.parametrize("tier", ["memory:", "file:."])
@pytest.mark.parametrize("memory", ["1 slots", "7 slots", "20 slots", f"{N} slots", "8 KiB"])
def test_bits_do_not_depend_on_the_budget(memory, tier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = jax.jit(gradient(ours(memory, tier)))
    expected = jax.jit(gradient(jax.lax.scan))(W, C0, XS)
    for _ in range(3):  # the first shows what steps and transfers take
        same(run(W, C0, XS), expected)
    assert list(tmp_path.iterdir()) == []


def test_64_bits():
    with jax.enable_x64(True):
        args = [jnp.asarray(a, jnp.float64) for a in (W, C0, XS)]
        grads = [jax.jit(gradient(scan))(*args) for scan in (ours(), jax.lax.scan)]
    for a, b in zip(*grads, strict=True):  # XLA may round otherwise here, as for checkpoint
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_inputs_differ_in_gradient_by_a_batch_of_them():
    many = jnp.stack([XS, 2 * XS])
    grads = [jax.jit(jax.vmap(gradient(scan), (None, None, 0))) for scan in (ours(), jax.lax.scan)]
    for a, b in zip(*(grad(W, C0, many) for grad in grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


class Failing:
    """Has what moves the bytes of loops fail by a rule: the number of a read, to an errno."""

    def __init__(self, fails):
        self.calls = 0

        def read(fd, data, nbytes, position):
            self.calls += 1
            failed = fails(self.calls)
            if failed:
                return -failed
            view = memoryview((ctypes.c_char * nbytes).from_address(data)).cast("B")
            done = os.preadv(fd, [view], position)
            if failed is None:
                view[0] ^= 1
            return done

        HOOKS.append(native.Transfer(read))  # threads call it until the stream is closed
        native.library().ms_loop_hooks(native.Transfer(), HOOKS[-1])


@pytest.mark.parametrize("n, every", [(9, 3), (10, 3), (2**31 - 1, 1000), (2**31 - 1, 2**31 - 1)])
def test_the_last_block_ends_with_the_last_step(n, every):
    last = (n - 1) // every
    assert int(stop_of(jnp.int32(last), jnp.int32(every), n)) == n
    assert int(stop_of(jnp.int32(0), jnp.int32(every), n)) == min(n, every)


@pytest.mark.parametrize("fails", [lambda n: errno.EIO if n % 2 else 0, lambda n: None])
def test_states_that_are_lost_or_corrupted_are_made_again(fails):
    c, xs = jnp.ones((600, 100)), jnp.ones((60, 1, 100)) * 0.1

    def total(scan, c):
        return (scan(lambda c, x: (jnp.sin(c) + x * c, None), c, xs)[0] ** 2).sum()

    failing = Failing(fails)
    found = jax.jit(jax.grad(partial(total, ours("2 slots"))))(c)
    same(found, jax.jit(jax.grad(partial(total, jax.lax.scan)))(c))
    told = mjax.last_report()
    assert failing.calls and told.lost and told.again


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_are_run_with_their_own_states_alone(compiled):
    seen = []

    def step(c, x):
        jax.debug.callback(lambda c: seen.append(float(c)), c)
        jax.debug.callback(lambda: seen.append("no state"))
        return c * x, None

    gradient = jax.grad(lambda c: ours("9 slots")(step, c, XS[:9, 0])[0])
    jax.block_until_ready((jax.jit(gradient) if compiled else gradient)(2.0))
    jax.effects_barrier()
    states = jax.lax.scan(lambda c, x: (c * x, c), 2.0, XS[:9, 0])[1]
    assert Counter(seen) == Counter([*map(float, states), *["no state"] * 9] * 2)


def test_a_tier_that_is_full_leaves_states_out():
    run = jax.jit(gradient(ours("2 slots", "memory:4KiB")))
    same(run(W, C0, XS), jax.jit(gradient(jax.lax.scan))(W, C0, XS))


def test_a_report_tells_what_a_run_did():
    jax.block_until_ready(jax.jit(gradient(ours()))(W, C0, XS))
    told = mjax.last_report()
    assert (told.steps, told.every, told.state_bytes) == (N, 5, 64)
    assert told.kept + told.refused == 10
    assert "53 steps in blocks of 5" in str(told)
    assert native.library().ms_loop_open_runs() == 0


def test_one_program_serves_all_values_and_a_length_each():
    traced = []

    @jax.jit
    def run(w, xs):
        traced.append(1)
        return jax.grad(lambda w: loss(ours(), w, C0, xs))(w)

    for n in (20, 31, 53):
        for scale in (1.0, 0.5):
            run(scale * W, XS[:n])
    assert len(traced) == 3


REFUSED = {
    "jvp": (lambda: jax.jvp(lambda w: loss(ours(), w, C0, XS), (W,), (W,)), TypeError, "jvp"),
    "second derivative": (
        lambda: jax.hessian(lambda w: loss(ours(), w, C0, XS))(W),
        ArgumentError,
        r"first derivatives, in reverse mode; for others \(hessian",
    ),
    "linearize": (
        lambda: jax.linearize(lambda w: loss(ours(), w, C0, XS), W)[1](W),
        TypeError,
        "forward-mode|jvp",
    ),
    "shard_map": (
        lambda: jax.shard_map(
            lambda c: jax.grad(lambda c: ours()(step_of(W), c[0], XS)[0].sum())(c),
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",)),
            in_specs=jax.sharding.PartitionSpec("d"),
            out_specs=jax.sharding.PartitionSpec("d"),
        )(C0[None]),
        ArgumentError,
        "no gradients inside shard_map",
    ),
    "another type": (
        lambda: ours()(lambda c, x: (c.astype(jnp.float16), None), C0, XS),
        TypeError,
        "float16.*which is float32",
    ),
    "another structure": (
        lambda: ours()(lambda c, x: ((c, c), None), C0, XS),
        TypeError,
        "structure",
    ),
    "a mutable reference": (
        lambda: mutating(jax.new_ref(C0)),
        ArgumentError,
        "closes over a mutable Ref",
    ),
    "three things": (
        lambda: ours()(lambda c, x: (c, x, x), C0, XS),
        TypeError,
        "f returns 3 things; it must return a pair",
    ),
    "no pair": (lambda: ours()(lambda c, x: c, C0, XS), TypeError, "it must return a pair"),
    "a carry of text": (
        lambda: ours()(lambda c, x: (c, None), {"h": C0, "name": "rod"}, XS),
        TypeError,
        r"init holds a str at \['name'\], which is no array",
    ),
    "a y of text": (
        lambda: ours()(lambda c, x: (c, "rod"), C0, XS),
        TypeError,
        "the y that f returns holds a str, which is no array",
    ),
    "a carry that was donated": (
        lambda: ours()(lambda c, x: (c, None), [donated()], XS),
        ArgumentError,
        r"init holds an array at \[0\] that was donated or deleted",
    ),
    "xs of scalars": (
        lambda: ours()(lambda c, x: (c, None), C0, (XS, 1.0)),
        ArgumentError,
        "xs holds a scalar",
    ),
    "xs of no arrays": (
        lambda: ours()(lambda c, x: (c, None), C0, {}),
        ArgumentError,
        "xs holds no arrays; give the number of steps, length=",
    ),
    "two lengths": (
        lambda: ours()(lambda c, x: (c, None), C0, (XS, XS[:3])),
        ArgumentError,
        r"lengths \[3, 53\]",
    ),
    "too many steps": (
        lambda: ours()(lambda c, x: (c, None), C0, length=2**31),
        ArgumentError,
        "length=2147483648 > 2147483647",
    ),
    "no length": (lambda: ours()(lambda c, x: (c, None), C0), ArgumentError, "length"),
    "no room": (
        lambda: jax.jit(lambda xs: ours(100)(lambda c, x: (c, None), C0, xs))(XS),
        BudgetError,
        "100 bytes < 384 bytes",
    ),
    "no room for a gradient": (
        lambda: jax.jit(jax.grad(lambda w: loss(ours(330), w, C0, XS)))(W),
        BudgetError,
        "330 bytes < ",
    ),
    "a program for several devices": (
        lambda: (
            jax.jit(gradient(ours()))
            .trace(W, jax.ShapeDtypeStruct(C0.shape, C0.dtype, sharding=SHARDED), XS)
            .lower(lowering_platforms=("cpu",))
        ),
        ArgumentError,
        "this one is for 2; leave its inputs on one",
    ),
    "a mesh in a type": (
        lambda: jax.jit(
            jax.grad(lambda c: ours()(step_of(jax.device_put(W, PLACED)), c, XS)[0].sum())
        )(C0),
        ArgumentError,
        "here is one on a mesh, float.*; put it on one",
    ),
    "a remote tier": (
        lambda: jax.jit(lambda xs: ours(tiers="s3://x/y")(lambda c, x: (c, None), C0, xs))(XS),
        ArgumentError,
        "cannot be used inside a compiled program",
    ),
    "cpus of a tier": (
        lambda: jax.jit(gradient(ours(tiers="memory:?cpus=0")))(W, C0, XS),
        ArgumentError,
        "threads= and cpus= are not for compiled programs",
    ),
    "no folder": (
        lambda: jax.jit(lambda w: loss(ours(tiers="file:/none/there"), w, C0, XS))(W),
        StoreError,
        "does not exist",
    ),
    "elements of 4 bits": (
        lambda: jax.jit(lambda c: ours()(lambda c, x: (c, None), c, XS))(C0.astype(jnp.int4)),
        ArgumentError,
        "smaller than a byte",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, kind, told = REFUSED[case]
    with pytest.raises(kind, match=told):
        call()


PMAP = """
import jax, jax.numpy as jnp, multistage.jax as mjax
def loss(c):
    options = {"length": 9, "memory": "3 slots", "tiers": "memory:"}
    return mjax.scan(lambda c, x: (jnp.sin(c), None), c, **options)[0].sum()
jax.pmap(jax.grad(loss))(jnp.ones((2, 3)))
"""


def test_pmap_is_refused():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    made = subprocess.run(
        [sys.executable, "-c", PMAP], capture_output=True, text=True, env=environment
    )
    assert "programs for one device, this one is for 2" in made.stderr


@pytest.mark.parametrize("between", [lambda: None, mjax.clear], ids=["", "cleared"])
def test_a_pullback_makes_states_that_are_gone_again(between):
    expected, pulled = jax.vjp(partial(loss, jax.lax.scan), W, C0, XS)
    found, pull = jax.vjp(jax.jit(partial(loss, ours())), W, C0, XS)
    for _ in range(3):
        between()
        same((found, pull(1.0)), (expected, pulled(1.0)))
    told = mjax.last_report()
    assert (told.steps, told.every, told.again) == (N, 5, 1), "but the first, which is saved again"
    assert native.library().ms_loop_open_runs() == 0


def test_a_tier_whose_folder_is_gone_is_told_by_one_message(tmp_path):
    run = jax.jit(gradient(ours(tiers=f"file:{tmp_path}")))
    jax.block_until_ready(run(W, C0, XS))
    mjax.clear()
    tmp_path.rmdir()
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as told:  # by how it is dispatched
        jax.block_until_ready(run(W, C0, XS))
    assert str(told.value).endswith(
        ": multistage: the tier of a loop, tiers= in its call, cannot be "
        "opened: No such file or directory"
    )
    assert str(told.value).count(": ") == 3


CALLED_OFTEN = {
    "rows": lambda scan: jax.jit(
        lambda c: [jax.vjp(lambda c: scan(step_of(W), c, XS)[0], c)[1](e) for e in jnp.eye(6)]
    )(C0),
    "by an outer loop": lambda scan: jax.jit(
        jax.grad(
            lambda c: jax.lax.scan(
                lambda h, x: (h + x * scan(step_of(W), c, XS)[0].sum(), None), 1.0, XS[:, 0]
            )[0]
        )
    )(C0),
    "by a loop over it": lambda scan: jax.jit(
        lambda c: jax.lax.map(jax.vjp(lambda c: scan(step_of(W), c, XS)[0], c)[1], jnp.eye(6))
    )(C0),
    "by a batch": lambda scan: jax.jit(
        jax.vmap(lambda c: jax.vjp(lambda c: scan(step_of(W), c, XS)[0], c)[1](c))
    )(jnp.stack([C0, 2 * C0])),
}


@pytest.mark.parametrize("case", CALLED_OFTEN)
def test_one_forward_sweep_serves_any_number_of_reverse_sweeps(case):
    same(CALLED_OFTEN[case](ours()), CALLED_OFTEN[case](jax.lax.scan))


@pytest.mark.parametrize("branches", [[0, 1, 2, 1], [0, 2, 2, 0], [[2, 2, 2, 2], [0, 1, 1, 1]]])
def test_branches_of_a_batch_leave_no_run_open_nor_states_to_make_again(branches):
    def run(scan):
        if isinstance(branches[0], int):
            return in_a_branch(scan, branches)
        return jax.vmap(partial(in_a_branch, scan))(jnp.asarray(branches))

    # XLA may round otherwise, since the select makes a batch of what the loop closes over.
    np.testing.assert_allclose(run(ours()), run(jax.lax.scan), rtol=1e-4, atol=1e-6)
    assert native.library().ms_loop_open_runs() == 0
    if 1 in jax.tree.leaves(branches):
        assert (mjax.last_report().again, mjax.last_report().lost) == (0, 0)


@pytest.mark.parametrize("twice", [False, True], ids=["other loops", "one loop"])
@pytest.mark.parametrize("branches", [[0, 1, 2, 1], [1, 1, 1, 2]])
def test_loops_of_two_branches_of_a_batch_are_kept_apart(branches, twice):
    found = in_two_branches(ours(), branches, twice)
    expected = in_two_branches(jax.lax.scan, branches, twice)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert native.library().ms_loop_open_runs() <= twice  # of a branch that no member took


def test_one_program_with_other_gradients_in_turn_stays_in_its_memory():
    def step(carry, x):
        few, many = carry
        return (few * 0.9 + x, jnp.tanh(W @ many + x)), jnp.tanh(many).sum()

    @jax.jit
    def run(few, many):
        last, ys = mjax.scan(step, (few, many), XS[:, 0], memory="1 KiB", tiers="memory:")
        return last[0] + ys.sum()

    def room(argnums):
        lowered = jax.jit(jax.grad(run, argnums=argnums)).lower(jnp.float32(1), C0)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    alone = room((0, 1))
    jax.clear_caches()
    room(0)
    assert room((0, 1)) <= alone


def test_the_least_memory_of_a_program_that_is_compiled_first_is_that_of_its_gradient():
    def run(memory):
        return jax.grad(jax.jit(partial(loss, ours(memory), W)))(C0, XS)

    with pytest.raises(BudgetError) as caught:
        run(10)
    same(run(caught.value.least_bytes), jax.grad(jax.jit(partial(loss, jax.lax.scan, W)))(C0, XS))


def test_gradients_that_are_not_asked_for_are_not_computed():
    def text(scan, argnums):
        traced = jax.make_jaxpr(jax.grad(partial(twice, scan, part=0), argnums=argnums))(W, C0, XS)
        return str(traced).count("dot_general")

    frozen, all_of_them = (text(ours(), argnums) for argnums in (1, (0, 1, 2)))
    assert frozen == all_of_them - 2, "the outer products"


def test_pullbacks_of_one_program_by_several_arguments_do_not_meet():
    def pulls(scan):
        run = jax.jit(partial(loss, scan))
        by_w = jax.vjp(lambda w: run(w, C0, XS), W)[1]
        by_c = jax.vjp(lambda c: run(W, c, XS), C0)[1]
        return by_w(1.0), by_c(1.0), by_w(2.0)

    same(pulls(ours()), pulls(jax.lax.scan))


def test_nothing_has_run_yet():
    program = "import multistage.jax as mjax; mjax.last_report()"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "no loop has run forward and back yet" in made.stderr
