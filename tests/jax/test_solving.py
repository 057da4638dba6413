"""`MultistageAdjoint` beside diffrax's own adjoint: the same gradient, of every kind of solve."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")
diffrax = pytest.importorskip("diffrax")

import jax.numpy as jnp  # noqa: E402 - after the skips

import multistage.jax as mjax  # noqa: E402
from multistage import native  # noqa: E402
from multistage.errors import ArgumentError, StoreError  # noqa: E402
from multistage.jax import solving  # noqa: E402
from multistage.jax.pullbacks import nbytes  # noqa: E402

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="needs the C core")

A = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)) / 3, jnp.float32)
Y0 = jnp.linspace(0.5, 1.5, 5)
OURS = mjax.MultistageAdjoint(memory="7 slots", tiers="memory:")
THEIRS = diffrax.RecursiveCheckpointAdjoint()
PID = diffrax.PIDController(rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def _nothing_open():
    yield
    assert native.library().ms_loop_open_runs() == 0
    native.library().ms_loop_clear()


def drift(t, y, a):
    return jnp.tanh(a @ y) - 0.1 * y * t


def noisy():
    path = diffrax.VirtualBrownianTree(0.0, 5.0, 1e-3, (5,), jax.random.key(1))
    control = diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.diag(y), path)
    return diffrax.MultiTerm(diffrax.ODETerm(drift), control)


def loss(
    adjoint, a, y0, terms=None, solver=None, controller=None, saveat=None, of=None, max_steps=4096
):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(drift) if terms is None else terms(),
        solver or diffrax.Heun(),
        0.0,
        5.0,
        0.05,
        y0,
        args=a,
        stepsize_controller=controller or diffrax.ConstantStepSize(),
        saveat=saveat or diffrax.SaveAt(t1=True),
        adjoint=adjoint,
        max_steps=max_steps,
    )
    if of is not None:
        return of(solution)
    leaves = jax.tree.leaves(solution.ys)
    return sum((jnp.where(jnp.isfinite(leaf), leaf, 0) ** 2).sum() for leaf in leaves)


CASES = {
    "constant steps": {},
    "adaptive steps": {"controller": PID, "solver": diffrax.Tsit5()},
    "at times": {"controller": PID, "saveat": diffrax.SaveAt(ts=jnp.linspace(0, 5, 13))},
    "at each step": {"controller": PID, "saveat": diffrax.SaveAt(t0=True, steps=True)},
    "dense": {
        "controller": PID,
        "saveat": diffrax.SaveAt(dense=True),
        "of": lambda solution: (solution.evaluate(1.3) ** 2).sum() + solution.evaluate(4.0).sum(),
    },
    "two places": {
        "saveat": diffrax.SaveAt(
            subs=[
                diffrax.SubSaveAt(ts=jnp.linspace(0, 5, 4)),
                diffrax.SubSaveAt(t1=True, fn=lambda t, y, a: {"product": y[0] * y[1]}),
            ]
        )
    },
    "implicit": {"solver": diffrax.Kvaerno3(), "controller": PID},
    "noise": {"solver": diffrax.Euler(), "terms": noisy},
    "noise, adaptive steps": {
        "terms": noisy,
        "controller": diffrax.PIDController(rtol=1e-2, atol=1e-3, dtmin=0.01),
    },
}


def close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(jnp.abs(a).max()))


def gradients(adjoint, batch, **options):
    found = jax.value_and_grad(lambda a, y: loss(adjoint, a, y, **options), argnums=(0, 1))
    if batch:
        return jax.jit(jax.vmap(found, (None, 0)))(A, jnp.stack([Y0, 2 * Y0, -3 * Y0]))
    return jax.jit(found)(A, Y0)


BATCHES = {"constant steps", "adaptive steps", "at each step", "noise, adaptive steps"}


@pytest.mark.long(but=["constant steps*"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_their_adjoint(case):
    batch = case in BATCHES  # its members take different numbers of steps
    close(gradients(THEIRS, batch, **CASES[case]), gradients(OURS, batch, **CASES[case]))
    if case == "constant steps":
        assert mjax.last_report().steps == 100


@pytest.mark.long
def test_bits_do_not_depend_on_the_budget(tmp_path):
    def found(memory, tier):
        adjoint = mjax.MultistageAdjoint(memory=memory, tiers=tier)
        return gradients(adjoint, False, controller=PID, max_steps=None)

    expected = found("4096 slots", "memory:")
    for memory, tier in [("1 slots", f"file:{tmp_path}"), ("3 slots", "memory:")]:
        for a, b in zip(
            jax.tree.leaves(found(memory, tier)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_a_solve_of_no_steps_has_a_gradient():
    def none(y):
        field = diffrax.ODETerm(lambda t, y, args: -y)
        solution = diffrax.diffeqsolve(field, diffrax.Euler(), 1.0, 1.0, 0.1, y, adjoint=OURS)
        return (solution.ys**2).sum()

    np.testing.assert_array_equal(jax.grad(none)(Y0), 2 * Y0)
    assert mjax.last_report().steps == 0


def test_a_solve_inside_a_step_of_another_has_the_gradients_of_all_its_arguments():
    def total(inner, a, y):
        def field(t, y, a):
            term = diffrax.ODETerm(lambda t, y, a: -a @ y)
            options = {"args": a, "max_steps": 16, "adjoint": inner}
            return diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 0.5, 0.1, y, **options).ys[0]

        term = diffrax.ODETerm(field)
        options = {"args": a, "max_steps": 16, "adjoint": THEIRS}
        return (
            diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 0.5, 0.1, y, **options).ys ** 2
        ).sum()

    found, expected = (
        jax.jit(jax.grad(lambda a, y, inner=inner: total(inner, a, y), argnums=(0, 1)))(A, Y0)
        for inner in (OURS, THEIRS)
    )
    close(expected, found)


def test_solves_in_branches_of_a_batch_are_kept_apart():
    def found(adjoint, a, y0, branch):
        def solve(rate):
            terms = diffrax.ODETerm(lambda t, y, a: jnp.tanh(a @ y) * rate - y)
            given = terms, diffrax.Euler(), 0.0, 1.0, 0.05, y0
            return diffrax.diffeqsolve(*given, args=a, adjoint=adjoint, max_steps=24).ys[-1]

        other = partial(jnp.matmul, a, y0)
        return jax.lax.switch(branch, [partial(solve, 1.0), partial(solve, 2.0), other]).sum()

    starts, branches = jnp.stack([Y0, 2 * Y0, 3 * Y0]), jnp.array([0, 2, 1])
    ours, theirs = (
        jax.jit(jax.vmap(jax.grad(partial(found, adjoint)), (None, 0, 0)))(A, starts, branches)
        for adjoint in (OURS, diffrax.DirectAdjoint())
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_solve_serves_any_number_of_pullbacks():
    def total(adjoint, y):
        def step(h, x):  # JAX solves once, since the solve is the same in all, and pulls back often
            return h + x * (loss(adjoint, A, y, of=lambda found: found.ys[0].sum())), None

        return jax.lax.scan(step, 1.0, jnp.linspace(0.1, 0.5, 3))[0]

    found, expected = (
        jax.jit(jax.grad(lambda y, adjoint=adjoint: total(adjoint, y)))(Y0)
        for adjoint in (OURS, THEIRS)
    )
    close(expected, found)
    assert mjax.last_report().again


def test_what_a_step_keeps_does_not_grow_with_the_times_that_are_saved(monkeypatch):
    kept = []

    def site_of(tier, memory, carry, residuals, *more):
        kept.append(nbytes(residuals))
        return made(tier, memory, carry, residuals, *more)

    made = solving.site_of
    monkeypatch.setattr(solving, "site_of", site_of)
    for count in (10, 1000):
        saveat = diffrax.SaveAt(ts=jnp.linspace(0, 5, count))
        jax.eval_shape(jax.grad(lambda y, saveat=saveat: loss(OURS, A, y, saveat=saveat)), Y0)
    assert len(set(kept)) == 1


def test_what_is_refused():
    path = diffrax.UnsafeBrownianPath((5,), jax.random.key(0))
    control = diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.diag(y), path)
    with pytest.raises(ArgumentError, match=r"use diffrax\.VirtualBrownianTree"):
        loss(OURS, A, Y0, lambda: diffrax.MultiTerm(diffrax.ODETerm(drift), control))
    with pytest.raises(StoreError, match="does not exist"):
        loss(mjax.MultistageAdjoint(memory="1 MiB", tiers="file:/none/there"), A, Y0)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1")
    with pytest.raises(ArgumentError, match=r"tested with diffrax 0\.7, .*0\.6\.1 is installed"):
        solving._require_tested()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ArgumentError, match=r"needs diffrax; .*\[diffrax\]"):
        solving._require_tested()


def test_diffrax_is_not_imported_before_it_is_asked_for():
    program = "import sys, multistage.jax; print('diffrax' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (made.stdout.strip(), made.stderr) == ("False", "")
