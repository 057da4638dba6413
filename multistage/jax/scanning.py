"""`scan`: `jax.lax.scan` within a memory budget, in a compiled program or driven from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from ..backends.urls import Tiers
from ..errors import ArgumentError
from ..model.budget import Budget
from ..planners import Plan, Planner
from .eager import Driven
from .handlers import Site, new_site, opened
from .loop import _as_arrays, _Loop, _pair_of
from .pullbacks import MOST_STEPS, site_of

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    memory: Budget | int | str,
    tiers: Tiers | None = None,
    until: Callable[[Carry], object] | None = None,
    planner: str | Plan | Planner = "auto",
    progress: bool | None = None,
) -> tuple[Carry, Y]:
    """Do what `jax.lax.scan(f, init, xs, length, reverse)` does, within a memory budget.

    Inside `jax.jit` the loop is part of the program.  Outside of it, with `jax.grad` or
    without, a `Reversal` runs it from Python, in compiled blocks of steps: with all tiers
    and planners, and with `until`.  The gradient is that of `jax.lax.scan`, whatever is kept
    where: to the last bit wherever XLA compiles a step alike in both programs, which it usually
    does; else the last bit may differ, as for `jax.checkpoint`.

    Parameters
    ----------
    f : callable
        `f(carry, x) -> (carry, y)`, pure; it may close over anything.  Run at least twice.
    init : pytree of arrays
        State 0.
    xs : pytree of arrays, optional
        Of the same length n; f is given a row of each.
    length : int, optional
        n, needed where there are no xs.
    reverse : bool
        Take the rows of xs from the last to the first.
    unroll : int or bool
        Without effect.
    memory : Budget, int or str
        For what the gradients of a block's steps are computed from, the buffers of the tier,
        state 0 and, outside of `jit`, states between blocks: bytes, `"64 MiB"`, or
        `"100 slots"` for a block of so many steps and so many states.  Inputs, outputs and
        gradients are not counted.  Under `vmap`, for each member of the batch.
    tiers : str, Path or Store, or a sequence of them, optional
        Where the other states go.  Inside `jit` one is needed, `"file:///scratch"` or `"memory:"`,
        each with a `capacity`; outside all that `Reversal` takes.
    until : callable, optional
        `until(carry)`, asked after each step, says whether it was the last: for a length that is
        not known.  `length` and xs, which may be left out, then give the most steps.  Outside of
        `jit`.
    planner : str, Plan or callable
        As for `Reversal`, whose steps are blocks here.  Outside of `jit`.
    progress : bool or None
        Show progress bars, of blocks; None: on a terminal or in a notebook.  Outside of `jit`.

    Returns
    -------
    (carry, ys)
        The last state, and the y of all steps.

    Raises
    ------
    ArgumentError
        For xs of different lengths, a mutable Ref that f closes over, arrays on several devices, on
        a mesh with explicit axes or that were donated.
        Inside `jit`: for what is only done outside of it, a tier that cannot be used inside a
        program, arrays whose elements are smaller than a byte, another device than a CPU, or
        without the C core.
    BudgetError
        For less memory than a block of one step takes: names the least.
    StoreError
        If the tier cannot be used.  All of them before the loop runs.
    TypeError
        If f returns no pair, or a carry of another structure, shape or dtype than it is given; for
        leaves that are no arrays.

    Notes
    -----
    Reverse mode, once: `jvp` and second derivatives are errors.  A pullback may be called again,
    which runs the loop forward once more.  Of `jax.checkpoint` the loop is run again as a whole.
    Under `vmap` and `jax.checkpoint` outside of `jit` the loop is run as inside of it.
    `last_report` tells what a run did.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> def loss(x):
    ...     last, ys = scan(
    ...         lambda c, _: (jnp.sin(c), c.sum()), x, length=100, memory="1 MiB", tiers="memory:"
    ...     )
    ...     return last.sum() + ys.sum()
    >>> x = jnp.ones(3)
    >>> jax.jit(jax.grad(loss))(x).shape
    (3,)

    A loop of unknown length, outside of `jit`:

    >>> def root(x):
    ...     def halved(h, _):
    ...         h = (h + x / h) / 2
    ...         return h, h
    ...     return scan(
    ...         halved, x, until=lambda h: abs(h * h - x) < 1e-5 * x, memory="1 MiB"
    ...     )[0]
    >>> print(f"{root(9.0):.3f} {jax.grad(root)(9.0):.3f}")
    3.000 0.167
    """
    budget = Budget.parse(memory)
    init, xs = _as_arrays(init, "init"), _as_arrays(xs, "xs")
    n = _length(xs, length, known=until is None)
    if until is not None and reverse:
        raise ArgumentError("until= finds the last step, where reverse=True would begin; flip xs")
    loop = _Loop.of(f if until is None else _asking(f, until), init, xs, n, reverse)
    driven = Driven(loop, budget, tiers, planner, progress, asks=until is not None)

    number = new_site()

    def site(residuals: tuple[jax.ShapeDtypeStruct, ...]) -> Site:
        _require_inside(tiers, until, planner, progress)
        return site_of(opened(cast(Any, tiers)), budget, loop.carry, residuals, n, number)

    made = loop.run(site, driven.plain, driven.forward) if n else (loop.carry, loop.blank(0))
    last, ys = loop.made(*made)
    return last, ys if until is None else ys[0]


def _length(xs: Any, length: int | None, *, known: bool) -> int:
    """Return the number of steps, or the most if it is not known.  Raises ArgumentError."""
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else -1 for leaf in jax.tree.leaves(xs)}
    if -1 in lengths:
        raise ArgumentError("xs holds a scalar; each of its arrays has a row for each step")
    if length is not None:
        lengths.add(int(length))
    if not lengths:
        if known:
            raise ArgumentError("xs holds no arrays; give the number of steps, length=")
        return MOST_STEPS
    if len(lengths) > 1 or min(lengths) < 0:
        raise ArgumentError(
            f"xs and length= give the lengths {sorted(lengths)}; they must give one, at least 0"
        )
    if max(lengths) > MOST_STEPS:
        raise ArgumentError(f"length={max(lengths)} > {MOST_STEPS}; put a loop in a loop")
    return lengths.pop()


def _asking(f: Callable[..., Any], until: Callable[..., object]) -> Callable[..., Any]:
    """Return f with another y: whether its step was the last."""

    def step(carry: Any, x: Any) -> Any:
        carry, y = _pair_of(f(carry, x))
        ended = jnp.asarray(cast(Any, until(carry)))
        if ended.shape:
            raise ArgumentError(
                f"until= returns an array of shape {ended.shape}; it must return one bool, such as "
                "(residual < 1e-6).all()"
            )
        return carry, (y, ended.astype(bool))

    return step


def _require_inside(tiers: object, until: object, planner: object, progress: object) -> None:
    """Raise ArgumentError for what is done outside of compiled programs only."""
    instead = {
        "until=": (until is not None, "give the number of steps, length="),
        "planner=": (planner != "auto", "leave it out"),
        "progress=True": (bool(progress), "leave it out"),
    }
    for name, (given, remedy) in instead.items():
        if given:
            raise ArgumentError(
                f"{name} is for loops that are run from Python; call multistage.jax.scan outside "
                f"of jit, vmap and jax.checkpoint, or {remedy}"
            )
    if tiers is None:
        raise ArgumentError(
            "inside a compiled program, tiers= is needed: a folder, as in 'file:///scratch', or "
            "'memory:'"
        )
