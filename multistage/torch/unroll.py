"""`unroll`: backpropagation through time beyond device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar, Unpack, overload

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..backends.urls import Tiers, tier_names
from ..errors import ArgumentError
from ..model.budget import Budget
from ..model.stages import StageCosts
from .environment.settings import uncompiled
from .environment.turns import looking
from .measurement.checking import Check, checked_choice
from .sequences.arguments import (
    CellPerStep,
    Options,
    Reduction,
    Settings,
    cells_of,
    is_varied,
    require_known,
    require_one_by_one,
    steps_of,
)
from .sequences.cells import Cells, Step
from .sequences.inputs import Given, Inputs
from .sequences.results import Outputs
from .sequences.results import Unrolled as Unrolled
from .sequences.running import run
from .sequences.survey import StateVaries, Survey
from .sequences.unroll_plan import UnrollPlanner

State = TypeVar("State")
Y = TypeVar("Y")
P = ParamSpec("P")


# A type checker does not know what a module returns: y then has any type.
@overload
def unroll(
    cell: Callable[Concatenate[State, P], tuple[State, Y]]
    | CellPerStep[Callable[Concatenate[State, P], tuple[State, Y]]],
    state: State,
    inputs: Given,
    *,
    outputs: Reduction = ...,
    **options: Unpack[Options],
) -> Unrolled[State, Y]: ...


@overload
def unroll(
    cell: Callable[Concatenate[State, P], tuple[State, Y]]
    | CellPerStep[Callable[Concatenate[State, P], tuple[State, Y]]],
    state: State,
    inputs: Given,
    *,
    outputs: Callable[[int, Y], object] | None,
    **options: Unpack[Options],
) -> Unrolled[State, None]: ...


@overload
def unroll(
    cell: Callable[Concatenate[State, P], State]
    | CellPerStep[Callable[Concatenate[State, P], State]],
    state: State,
    inputs: Given,
    *,
    outputs: Outputs = ...,
    **options: Unpack[Options],
) -> Unrolled[State, object]: ...


@overload
def unroll(
    cell: Step | CellPerStep[Step],
    state: object,
    inputs: Given,
    *,
    outputs: Outputs = ...,
    **options: Unpack[Options],
) -> Unrolled[object, object]: ...


@uncompiled
def unroll(
    cell: Step | CellPerStep[Step],
    state: object,
    inputs: Given,
    *,
    n_steps: int | None = None,
    memory: int | str | float | None = None,
    tiers: Tiers = (),
    chunk: int | None = None,
    fused: bool = False,
    outputs: Outputs = "stack",
    parameters: Sequence[Tensor] | None = None,
    planner: UnrollPlanner = "auto",
    random: bool | None = None,
    progress: bool | None = None,
    check: Check = "error",
    unequal: bool | None = None,
    costs: StageCosts | None = None,
) -> Unrolled[object, object]:
    """Run a cell over a sequence of any length, with its gradient within a memory limit.

    Results are bit-identical to those of plain autograd: of a loop that calls the cell
    step by step, or a fused cell chunk by chunk.  The result is part of the autograd
    graph: gradients reach the initial state, inputs that require them,
    and the parameters, each added once per backward pass.

    Parameters
    ----------
    cell : callable, or sequence of callables
        `cell(state, x_t)` returns the next state, or `(state, y_t)`, where y_t may be
        None; `nn.LSTM`, `nn.GRU`, `nn.LSTMCell` and similar modules are called with
        their own order of arguments.  A cell must return the same when it runs again, and must not
        write to its state.
        A list, tuple or `nn.ModuleList` holds one cell for each step; each takes
        the state that the cell before it returns.
    state : pytree of Tensor
        State 0; later states have its structure, shapes, dtypes and devices, unless
        steps are unequal.
    inputs : Tensor, sequence, callable or None
        x_t: a tensor with time first, a list or tuple of trees of tensors, or a
        function of t or other sequence, which is called again when steps are run
        again, so that inputs need not fit in memory.  It is part of the cell:
        parameters it uses get gradients.
    n_steps : int, optional
        Time steps; needed for a function, unless there is a cell for each.  Of other
        inputs it must be their number.
    memory : int, str, float or None
        Limit for states and graphs on the device: bytes, `"2 GiB"`, a fraction
        (a float up to 1) of the memory of plain autograd, or None for the free
        memory.  Inputs, stacked outputs, parameters and their gradients are not
        part of it.
    tiers : str or Store, or a sequence of them
        Slow tiers for states, such as `"file:///scratch"`; or
        `["pinned:8GiB", "file:///scratch"]`, where states that overflow the first
        move on to the second, the oldest first.  On a machine without a
        CUDA device `"pinned:"` is host memory.
    chunk : int, optional
        Time steps that make one step of the schedule; chosen from measurements
        if not given.
    fused : bool
        Whether the cell takes several steps at once: `x` and `y` with time first.
        `nn.LSTM` and similar modules always do.
    outputs : {"stack", "sum", "last"}, callable or None
        How outputs y are combined: stacked with time first, added, only that of the
        last step, passed to `outputs(t, y_t)` once and in order (without gradient),
        or dropped (None).  A y, or a leaf of y, that is a single number is a loss;
        losses are always added.
    parameters : sequence of Tensor, optional
        Tensors whose gradients are required; default: those of the module, and leaves
        found in the graph of a step.  It may contain frozen tensors.
    planner : {"auto", "keep", "recompute", "stream", "offload"}
        `"auto"`: the fastest by measurement; `"keep"`: plain autograd; `"recompute"`:
        keep some states and run all steps again; `"stream"`: write states to the
        tiers; `"offload"`: write tapes to the tiers and recompute nothing.
    random : bool, optional
        Whether the cell draws random numbers; determined in its first step if
        not given.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook.
    check : {"error", "warn", "off"}
        Whether to run a few steps of the first sequence of a kind both plainly and by
        a schedule that recomputes them, and to compare the results bit for bit; and
        whether to compare the results of each recomputed chunk with those of its
        first run, by checksums.  A difference raises StateError, or issues a
        DifferenceWarning.  The check calls the cell, and `inputs` if it is a
        function, some more times.
    unequal : bool, optional
        Whether steps may differ in cost and states in size; see Notes.  If not given,
        determined from the cells, from a list of inputs, and from the first step.
    costs : StageCosts, optional
        Costs of the time steps, one Stage for each, instead of measured costs;
        `tape_bytes` is the graph of the step.

    Returns
    -------
    Unrolled
        With the types of the state and of y that the cell declares.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        Before the sequence runs: rule, values, remedy.
        BudgetError also in the backward pass, if values that were not measured, such
        as the length of a loop, have made graphs larger than the memory allows.
    StateError
        If the cell returns another kind of state than it gets, or writes to it; if
        unequal steps differ from their kind, or a cell does not run on the state
        that the cell before it returns.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> cell = torch.nn.LSTMCell(8, 16)
    >>> x, h, c = torch.randn(200, 4, 8), torch.zeros(4, 16), torch.zeros(4, 16)
    >>> out = mst.unroll(cell, (h, c), x, memory="64 KiB", outputs="last")
    >>> out.outputs.sum().backward()
    >>> out.plan.planner, cell.weight_hh.grad.shape
    ('recompute', torch.Size([64, 16]))

    Cells of several widths, one for each step:

    >>> class Layer(torch.nn.Linear):
    ...     def forward(self, h, x):
    ...         return torch.tanh(super().forward(h))
    >>> widths = [(4, 64), (64, 64), (64, 16), (16, 4)]
    >>> cells = [Layer(n, m) for n, m in widths] * 4
    >>> out = mst.unroll(cells, torch.ones(512, 4, requires_grad=True), None, memory=0.7)
    >>> out.plan.planner, [(stage.output_bytes, count) for stage, count in out.plan.kinds]
    ('recompute', [(131072, 4), (131072, 4), (32768, 4), (8192, 4)])

    Notes
    -----
    Unequal steps: several cells; states that change their tree, shapes or dtypes; x_t
    of several shapes, or with a few (8 at most) different ints, texts or other values
    beside tensors, as a list.  A step's kind is its cell, the shapes of the state before
    it and those of x_t, and these values.  One step of each kind, 64 kinds at most, is
    run and measured, and the chunks are planned as a chain of unequal stages by
    `plan_chain`: states or whole graphs are kept, the rest is run again.  A function of
    t is called once more at each step to learn the shapes.  States travel to the first
    tier, by way of host memory; graphs do not.  Steps that return y must all return the
    same tree; where a cell returns a pair that is not like the state it got, the pair is
    `(state, y)`.

    Sequences of unequal length: pad them, and let the cell keep the state
    where the mask says so, `torch.where(mask_t, new, old)`.

    A fused cell is called chunk by chunk, and its kernels may round otherwise
    than in one call over the whole sequence; the check compares both, and
    `plan.checked` says which are equal.  The chunk is chosen by the clock, within the
    limit: give `chunk` for the same bits in every run and under every limit.

    Under autocast each chunk's contribution to a parameter's gradient is added
    in the parameter's own precision; plain autograd adds all of them in the
    lower one.  Where several sequences of one loss, or its other parts, use a
    parameter too, each sequence's whole contribution is added at once; plain
    autograd adds them step by step, which may round otherwise.  A tensor that
    the cell takes from elsewhere and that requires a gradient only at later steps
    must be given in `parameters`.
    """
    require_known(planner, outputs, chunk)
    limit = None if memory is None else Budget.parse(memory, "memory", of="stages")
    settings = Settings(
        limit, tier_names(tiers), chunk, planner, progress, checked_choice(check), costs
    )
    if not (costs is None or isinstance(costs, StageCosts)):
        raise ArgumentError(
            f"costs is {type(costs).__name__}; give a StageCosts with one Stage for each time step"
        )
    several = cells_of(cell)
    sequence = Inputs(inputs, steps_of(several, inputs, n_steps))
    made = inputs if sequence.made else None
    varied = is_varied(several, sequence, costs)
    if varied and unequal is False:
        raise ArgumentError(
            "unequal=False is for one cell, x_t of one shape and no costs=, and here are several "
            "cells, several shapes of x_t, or costs; leave it out"
        )
    if unequal is None and sequence.few_values() > 1 and planner != "offload":
        varied = varied or not (fused or isinstance(cell, nn.RNNBase))
    equal = not (varied or unequal)
    each: list[Step] = [cell] if several is None else several  # type: ignore[list-item]
    if not equal:
        require_one_by_one(each, fused=fused)
    sequence.shared_with(pytree.tree_leaves(state))
    cells = Cells(each, fused, made)
    with looking():
        for alike in (equal, False):  # those that are taken to be equal may turn out to differ
            found = Survey(cells, state, sequence, parameters, settings, alike)
            try:
                facts = found.facts(random)
                break
            except StateVaries:
                if unequal is not None or cells.fused:
                    raise
    return run(found, facts, state, outputs, settings)
