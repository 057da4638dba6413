"""`unroll`: backpropagation through time beyond device memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..backends.base import Store
from ..backends.lifetimes import Birth, end
from ..backends.urls import Tiers, tier_names
from ..costs import Costs
from ..errors import ArgumentError, MultistageError
from ..execute import Executor
from ..plan import PLANNERS
from ..progress import Bars
from .cell import Cell, Facts
from .cell_costs import STRATEGIES, Strategy, UnrollPlan
from .checking import Check, Checked, check_chain, checked_choice
from .collector import Collector
from .environment import generators_of
from .exploring import tensors_of
from .exploring_cells import explore
from .inputs import InputGradients, Inputs
from .offload import offload
from .planning import TRAVELS_BYTES, Settings, planned
from .randomness import cuda_or_cpu, refuse_hidden_draws
from .surroundings import Surroundings
from .tensors import TensorLayout, TensorState, TensorStates
from .through_time import ThroughTime, run_steps
from .tiers import open_tiers

_OUTPUTS = ("stack", "sum", "last")
_CHECKED = 12  # steps at most that a check runs


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What `unroll` returns.

    Attributes
    ----------
    state : pytree of Tensor
        The state after the last step.
    loss : Tensor or None
        Sum of the losses of all steps, if the cell returns any.
    outputs : pytree of Tensor or None
        y of all steps, reduced as asked for.
    plan : UnrollPlan or None
        How it was run; None where no gradient is wanted.
    """

    state: Any
    loss: Tensor | None
    outputs: Any
    plan: UnrollPlan | None


def unroll(
    cell: Callable[..., Any],
    state: Any,
    inputs: Any,
    *,
    steps: int | None = None,
    memory: int | str | float | None = None,
    tiers: Tiers = (),
    chunk: int | None = None,
    fused: bool = False,
    outputs: Any = "stack",
    parameters: Sequence[Tensor] | None = None,
    strategy: Strategy = "auto",
    random: bool | None = None,
    progress: bool | None = None,
    check: Check = "error",
) -> Unrolled:
    """Run a cell over a sequence, so that its gradient fits the memory, whatever the length.

    The numbers are those of plain autograd.  The result takes part in autograd
    like any other: gradients reach the initial state, inputs that want them,
    and the parameters, each added up once per backward.

    Parameters
    ----------
    cell : callable
        `cell(state, x_t)` returns the next state, or `(state, y_t)`; an
        `nn.LSTM`, `nn.GRU`, `nn.LSTMCell` or the like is called its own way.
        It must do the same when it is run again, and not write to its state.
    state : pytree of Tensor
        State 0; every state has its structure, shapes, dtypes and devices.
    inputs : Tensor, sequence, callable or None
        x_t: a tensor with time first, a list or tuple of trees of tensors, or a
        function of t or other sequence, which is called again when steps are run
        again, so that inputs need not fit in memory.  It is part of the cell:
        parameters it uses get gradients.
    steps : int, optional
        Time steps; needed for a function.
    memory : int, str, float or None
        Limit for states and graphs on the device: bytes, `"2 GiB"`, a fraction
        (a float up to 1) of what plain autograd takes, or None for what is
        free.  Inputs, outputs that are stacked, parameters and their gradients
        are not part of it.
    tiers : str or Store, or a sequence of them
        Slow tiers for states, such as `"file:///scratch"`; or
        `["pinned:8GiB", "file:///scratch"]`, where what overflows the first
        goes on to the second, the oldest states first.  On a machine without a
        CUDA device `"pinned:"` is host memory.
    chunk : int, optional
        Time steps that make one step of the schedule; chosen from measurements
        if not given.
    fused : bool
        Whether the cell takes several steps at once: `x` with time first, and
        `y` too.  `nn.LSTM` and the like always do.
    outputs : {"stack", "sum", "last"}, callable or None
        What becomes of y: stacked with time first, added up, that of the last
        step, handed to `outputs(t, y_t)` once and in order (without gradient),
        or nothing.  A y of one number, or any leaf that is, is a loss and is
        always added up.
    parameters : sequence of Tensor, optional
        That gradients are wanted of; default: those of the module, and leaves
        found in the graph of a step.
    strategy : {"auto", "keep", "recompute", "stream", "offload"}
        The fastest by measurement; plain autograd; states kept and run again
        from; states streamed to the tiers; tapes streamed there, and nothing
        run again.
    random : bool, optional
        Whether the cell draws random numbers; found out in its first step if
        not given.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook.
    check : {"error", "warn", "off"}
        Whether a few steps of the first sequence of a kind are run plainly and by
        a schedule that runs them again, and compared bit for bit; and what each
        chunk returns when it is run again is compared with what it returned at
        first, by checksums.  If they differ, raise StateError, or issue a
        DifferenceWarning.  The cell, and `inputs` if it is a function, are called
        some more times for it.

    Returns
    -------
    Unrolled

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        Before the sequence is run: rule, values, remedy.
    StateError
        If the cell returns another kind of state than it gets, or writes to it.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> cell = torch.nn.LSTMCell(8, 16)
    >>> x, h, c = torch.randn(200, 4, 8), torch.zeros(4, 16), torch.zeros(4, 16)
    >>> out = mst.unroll(cell, (h, c), x, memory="64 KiB", outputs="last")
    >>> out.outputs.sum().backward()
    >>> out.plan.strategy, cell.weight_hh.grad.shape
    ('recompute', torch.Size([64, 16]))

    Notes
    -----
    Sequences of unequal length: pad them, and let the cell keep the state
    where the mask says so, `torch.where(mask_t, new, old)`.

    A fused cell is called chunk by chunk, and its kernels may round otherwise
    than in one call over the whole sequence.  The chunk is chosen by the clock:
    give `chunk` for the same bits in every run.

    Under autocast each chunk's contribution to a parameter's gradient is added
    in the parameter's own precision; plain autograd adds all of them in the
    lower one.  Where several sequences of one loss, or its other parts, use a
    parameter too, each sequence's whole contribution is added at once; plain
    autograd adds them step by step, which may round otherwise.  A tensor that
    the cell takes from elsewhere and that wants a gradient only at later steps
    must be given in `parameters`.
    """
    if strategy not in STRATEGIES:
        raise ArgumentError(f"strategy {strategy!r} is not known; choose one of {STRATEGIES}")
    if not (outputs is None or callable(outputs) or outputs in _OUTPUTS):
        raise ArgumentError(f"outputs={outputs!r} is not known; choose one of {_OUTPUTS}, None, f")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ArgumentError(f"chunk={chunk!r} must be an int, at least 1")
    sequence = Inputs(inputs, steps)
    known = Cell(cell, fused, inputs if sequence.made else None)
    settings = Settings(memory, tier_names(tiers), chunk, strategy, progress, checked_choice(check))
    leaves = pytree.tree_leaves(state)
    sequence.shared_with(leaves)
    generators = generators_of([known.scope], [*tensors_of(state), *sequence.held()])
    facts = explore(known, state, sequence, generators, parameters, random, check)
    wanted = [*leaves, *sequence.tensors(), *facts.parameters]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in wanted):
        return _plain(known, facts, state, sequence, outputs, chunk, graph=False)
    sequence.known_as(facts.parameters)
    involved = [*leaves, *sequence.held(), *facts.parameters]
    device, around = cuda_or_cpu(involved), Surroundings(known, facts, generators, involved)
    store = open_tiers(settings.tiers, device)
    collector = Collector(facts, sequence.steps, outputs, known.fused)
    chain = ThroughTime(known, facts, sequence, collector, around, 1, device)
    chain.check = check
    return _run(chain, state, store, settings, outputs)


def _run(
    chain: ThroughTime,
    state: Any,
    store: Store | None,
    settings: Settings,
    outputs: Any,
) -> Unrolled:
    """Plan and run a sequence that wants gradients."""
    known, facts, sequence, device = chain.cell, chain.facts, chain.inputs, chain.device
    leaves, spec = pytree.tree_flatten(state)
    wanted = [*leaves, *sequence.tensors(), *facts.parameters]
    names = chain.names([f"leaf {k} of the state" for k in range(len(leaves))])
    first = chain.first(leaves)
    layout = TensorLayout(first.tensors, names)
    chosen = planned(
        chain,
        leaves,
        layout,
        store,
        settings,
        lambda plan: _checked(chain, state, outputs, plan, settings.check),
    )
    if chosen.plan is None:
        tapes: Any = contextlib.nullcontext()
        if chosen.strategy == "offload":
            held = [t for t in [*leaves, sequence.given] if isinstance(t, Tensor)]
            tapes = offload(settings.tiers, min_bytes=TRAVELS_BYTES, stays=held, device=device)
        with tapes:
            result = _plain(known, facts, state, sequence, outputs, settings.chunk, graph=True)
        return Unrolled(result.state, result.loss, result.outputs, chosen)
    refuse_hidden_draws(known.scope.modules, known.name)
    chain.chunk = chosen.chunk
    if not chosen.plan.writes:
        store = None
    run = _Run(chain, first, chosen, store, layout, names, Bars(settings.progress))
    return _through(run, chosen, spec, wanted)


def _through(
    run: _Run, chosen: UnrollPlan, spec: pytree.TreeSpec, wanted: Sequence[Tensor]
) -> Unrolled:
    """Run a sequence by its schedule."""
    try:
        found = _ThroughAutograd.apply(run, *wanted)
    except BaseException:
        run.close()  # now: a traceback may keep it for long
        raise
    values = [None if n is None else found[n] for n in run.places]
    loss, reduced = _results(run.chain.facts, values[spec.num_leaves :])
    last = pytree.tree_unflatten(values[: spec.num_leaves], spec)
    return Unrolled(last, loss, reduced, chosen)


def _checked(
    chain: ThroughTime, state: Any, outputs: Any, chosen: UnrollPlan, check: Check
) -> Checked:
    """Run the first steps plainly, and by a schedule that runs them again; compare.

    They are at most as many as one chunk has, so that their graph fits the limit, where a
    chunk has three.
    """
    if check == "off":
        return Checked("off")
    if any(each.enabled for each in chain.around.settings.autocast):
        return Checked("not checked; under autocast gradients are added in another precision")
    cell, facts = chain.cell, chain.facts
    count = min(chain.inputs.steps, max(3, min(chosen.chunk, _CHECKED)))
    size = -(-count // 3)
    few = Inputs(chain.inputs.given, count)
    few.known_as(facts.parameters)
    mode = None if callable(outputs) else outputs
    # Where nothing is run again: measuring ran the cell, which must have left no trace.
    turns = Costs(1.0, 1.0, 1) if chosen.plan is None else replace(chosen.plan.costs, tiers=())
    short = PLANNERS["revolve"](turns, 1, -(-count // size))
    plan = replace(chosen, steps=count, chunk=size, plan=short)

    def plainly(given: Any) -> Any:
        found = _plain(cell, facts, given, few, mode, size if cell.fused else None, graph=True)
        return found.state, found.loss, found.outputs

    def scheduled(given: Any) -> Any:
        leaves, spec = pytree.tree_flatten(given)
        collector = Collector(facts, count, mode, cell.fused)
        part = ThroughTime(cell, facts, few, collector, chain.around, size, chain.device)
        part.check = chain.check
        names = part.names([f"leaf {k} of the state" for k in range(len(leaves))])
        first = part.first(leaves)
        layout = TensorLayout(first.tensors, names)
        run = _Run(part, first, plan, None, layout, names, Bars(False))
        found = _through(run, plan, spec, [*leaves, *few.tensors(), *facts.parameters])
        return found.state, found.loss, found.outputs

    return check_chain(
        plainly,
        plainly if chosen.plan is None else scheduled,
        state,
        name=cell.name,
        stages=[cell.given],
        room_bytes=chosen.memory_bytes / 2,
        writes=False,
        check=check,
        targets=[*few.tensors(), *facts.parameters],
    )


def _results(facts: Facts, values: Sequence[Tensor | None]) -> tuple[Tensor | None, Any]:
    """Return the loss and the outputs from the reduced leaves of y."""
    if facts.y_spec is None:
        return None, None
    whole = pytree.tree_unflatten(list(values), facts.y_spec)
    if facts.y_spec.is_leaf():
        return (whole, None) if facts.summed[0] else (None, whole)
    loss = whole.get("loss") if isinstance(whole, dict) else None
    return (loss if isinstance(loss, Tensor) and loss.dim() == 0 else None), whole


# ---------------------------------------------------------------------- running


def _plain(
    cell: Cell,
    facts: Facts,
    state: Any,
    inputs: Inputs,
    mode: Any,
    chunk: int | None,
    *,
    graph: bool,
) -> Unrolled:
    """Run the steps as they are written, with or without a graph."""
    collector = Collector(facts, inputs.steps, mode, cell.fused, graph=graph)
    x = inputs.many if cell.fused else inputs.at
    size = inputs.steps if chunk is None else chunk
    last = state
    for start in range(0, inputs.steps, size):
        steps = start, min(start + size, inputs.steps)
        leaves = run_steps(cell, facts, last, steps, x, lambda found: collector.add(*found))
        last = pytree.tree_unflatten(leaves, facts.spec)
    loss, outputs = _results(facts, collector.values())
    return Unrolled(last, loss, outputs, None)


class _Run:
    """One sequence, forward and backward; lives as long as the graph it is part of."""

    def __init__(
        self,
        chain: ThroughTime,
        first: TensorState,
        plan: UnrollPlan,
        store: Store | None,
        layout: TensorLayout,
        names: Sequence[str],
        bars: Bars,
    ) -> None:
        self.chain = chain
        self._bars = bars
        self._first = first
        self._plan = plan
        self._ready = False
        self.places: list[int | None] = []  # in the results, of the state's leaves and y's
        stores: tuple[Store, ...] = ()
        if store is not None:
            store.open(layout.record)
            stores = (store,)
        assert plan.plan is not None
        self._executor: Executor[TensorState, Any] = Executor(
            bars.watch(chain, plan.plan.costs.forward_step_s),
            stores,
            slots=plan.plan.slots,
            states=TensorStates(names),
            progress=bars.update if bars.shown else None,
        )
        self._end = weakref.finalize(self, _end, self._executor, store, Birth.here())

    def close(self) -> None:
        """Forget the sweep; close the tier and give it back."""
        self._end()

    def forward(self) -> TensorState:
        """Run all steps; return the last state."""
        assert self._plan.plan is not None
        with contextlib.closing(self._bars) as bars, self.chain.around.settled(keep=True):
            bars.start(self._plan.plan.n_steps)
            last = self._executor.forward(self._plan.plan.schedule(), self._first)
        self._ready = True
        return last

    def backward(
        self, adjoint: tuple[Tensor | None, ...], outputs: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of state 0; those of inputs and parameters lie in the chain."""
        chain = self.chain
        chain.output_gradients = outputs
        chain.sums = [None] * len(chain.facts.parameters)
        chain.of_inputs = InputGradients(chain.inputs)
        with chain.replaying():
            if not self._ready:  # a second backward: stand where the forward sweep ended
                assert self._plan.plan is not None
                self._executor.forward(self._plan.plan.schedule(), self._first)
            self._ready = False
            assert self._plan.plan is not None
            with contextlib.closing(self._bars) as bars:
                bars.back(self._plan.plan.n_steps)
                gradients: tuple[Tensor | None, ...] = self._executor.reverse(adjoint)
            chain.verify()
            return gradients


def _end(executor: Executor[TensorState, Any], store: Store | None, birth: Birth) -> None:
    def close() -> None:
        executor.abort()
        if store is not None:
            store.close()

    end(close, birth)


class _ThroughAutograd(torch.autograd.Function):
    """The sequence as one operation of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        chain = run.chain
        facts = chain.facts
        last = run.forward().tensors[: facts.spec.num_leaves]
        results, flags, run.places = chain.results(last)
        chain.collector.clear()  # a result that leads to its graph must not be part of it
        ctx.mark_non_differentiable(
            *(t for t, flag in zip(results, flags, strict=True) if t is not None and not flag)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise MultistageError(
                "double backward (create_graph=True) through unroll is not supported; give it "
                "memory enough to keep every tape, or strategy='keep'"
            )
        chain = ctx.run.chain
        count, places = chain.facts.spec.num_leaves, ctx.run.places
        # A result that stands at several places has one gradient, that of its first.
        each = [
            None if n is None or n in places[:i] else gradients[n] for i, n in enumerate(places)
        ]
        of_state = ctx.run.backward(tuple(each[:count]), each[count:])
        assert chain.of_inputs is not None
        of_inputs, sums = chain.of_inputs.values(), chain.sums
        chain.of_inputs, chain.sums = None, []
        return (None, *of_state, *of_inputs, *sums)
