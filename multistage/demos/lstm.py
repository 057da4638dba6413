"""A character-level LSTM in NumPy, trained by full backpropagation through time.

The network of the paper's experiment (Kukreja et al. 2018, section 5): one
layer, softmax over the characters, loss at every step.  One step of the
schedule is one character of each stream.  The state is (h, c); the adjoint
step starts from the state before it, so a state is its own tape.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from ..durable.status import inspect
from ..errors import ArgumentError
from ..measurement.probe import measure
from ..model.budget import Budget
from ..model.chain import FunctionChain
from ..model.costs import Costs
from ..planners import PLANNERS
from ..report import Report
from ..reversal import Reversal
from ..states.layout import Array, Layout
from ..support.units import format_bytes, format_seconds
from .text import encode, standard_library
from .watching import add_progress, shown, told_if_stopped

State = tuple[Array, Array]
Adjoint = dict[str, Array]

# Rows of the matrix products that add up parameter gradients.
_BLOCK_ROWS = 64


class LSTM:
    """One LSTM layer and a softmax over the next character.

    Parameters
    ----------
    streams : uint8, shape (steps + 1, batch)
        Character numbers; see `encode`.
    vocabulary, width : int
    dtype : numpy dtype
    seed : int

    Attributes
    ----------
    parameters, gradients : dict of arrays
        Input weights with the bias (vocabulary, 4 width), recurrent weights
        (width, 4 width), output weights (width, vocabulary) and bias.
    loss : float
        Sum of the cross entropies of the adjoint steps since `clear`.
    """

    def __init__(
        self, streams: Array, vocabulary: int, width: int, dtype: Any = np.float64, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.streams = streams
        self.width = width
        self.dtype = np.dtype(dtype)
        self.batch = streams.shape[1]
        scale = 1 / np.sqrt(width)

        def weights(*shape: int) -> Array:
            return rng.uniform(-scale, scale, shape).astype(self.dtype)

        self.parameters = {
            "input": weights(vocabulary, 4 * width),
            "recurrent": weights(width, 4 * width),
            "output": weights(width, vocabulary),
            "bias": np.zeros(vocabulary, self.dtype),
        }
        self.parameters["input"][:, width : 2 * width] += 1  # remember at first
        self.gradients = {name: np.zeros_like(p) for name, p in self.parameters.items()}
        self.loss = 0.0
        self._rows = np.arange(self.batch)
        # The adjoint step only notes the factors of its outer products; a block
        # of steps then adds them with one matrix product each.  Steps are
        # reversed in the same order whatever the schedule, so bits agree.
        self._noted, self._block = 0, max(1, _BLOCK_ROWS // self.batch)
        rows = (self._block, self.batch)
        self._hidden_before = np.empty((*rows, width), self.dtype)
        self._hidden_after = np.empty((*rows, width), self.dtype)
        self._gate_adjoints = np.empty((*rows, 4 * width), self.dtype)
        self._logit_adjoints = np.empty((*rows, vocabulary), self.dtype)
        self._moments = {name: np.zeros_like(p) for name, p in self.parameters.items()}
        self._squares = {name: np.zeros_like(p) for name, p in self.parameters.items()}
        self._updates = 0

    def start(self) -> State:
        """Return state 0."""
        shape = (self.batch, self.width)
        return np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)

    def clear(self) -> None:
        """Forget loss and gradients before a sweep."""
        self.loss, self._noted = 0.0, 0
        for gradient in self.gradients.values():
            gradient[...] = 0

    def _gates(self, h: Array, i: int) -> tuple[Array, Array]:
        """Return the sigmoid gates (batch, 3 width): input, forget, output; and the candidate."""
        split = 3 * self.width
        z = h @ self.parameters["recurrent"]
        z += self.parameters["input"][self.streams[i]]
        # sigmoid(x) = (1 + tanh(x / 2)) / 2: one call for all four.
        z[:, :split] *= 0.5
        np.tanh(z, out=z)
        gates = z[:, :split]
        gates += 1
        gates *= 0.5
        return gates, z[:, split:]

    def step(self, state: State, i: int) -> State:
        """Return the state after reading character i."""
        h, c = state
        w = self.width
        gates, candidate = self._gates(h, i)
        new_c = gates[:, w : 2 * w] * c
        new_c += gates[:, :w] * candidate
        new_h = np.tanh(new_c)
        new_h *= gates[:, 2 * w :]
        return new_h, new_c

    def tape_step(self, state: State, i: int) -> tuple[State, tuple[Array, ...]]:
        """Return the state after reading character i, and what its adjoint step needs."""
        h, c = state
        w = self.width
        gates, candidate = self._gates(h, i)
        new_c = gates[:, w : 2 * w] * c
        new_c += gates[:, :w] * candidate
        tanh_c = np.tanh(new_c)
        new_h = tanh_c * gates[:, 2 * w :]
        return (new_h, new_c), (h, c, gates, candidate, tanh_c, new_h)

    def adjoint_step(self, state: State, adjoint: State, i: int) -> State:
        """Return the adjoint before step i from the state there; see `adjoint_of_tape`."""
        return self.adjoint_of_tape(self.tape_step(state, i)[1], adjoint, i)

    def adjoint_of_tape(self, tape: tuple[Array, ...], adjoint: State, i: int) -> State:
        """Return the adjoint before step i; add its loss and parameter gradients."""
        h, c, gates, candidate, tanh_c, new_h = tape
        dh, dc = adjoint
        w, p = self.width, self.parameters
        into, forget, out = gates[:, :w], gates[:, w : 2 * w], gates[:, 2 * w :]

        logits = new_h @ p["output"]
        logits += p["bias"]
        logits -= logits.max(axis=1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=1, keepdims=True)
        targets = self.streams[i + 1]
        self.loss -= float(np.log(logits[self._rows, targets]).sum())
        logits[self._rows, targets] -= 1  # now the gradient of the logits
        k = self._noted
        self._hidden_before[k], self._hidden_after[k] = h, new_h
        self._logit_adjoints[k] = logits

        dh = dh + logits @ p["output"].T
        dc = dc + dh * out * (1 - tanh_c * tanh_c)
        dz = self._gate_adjoints[k]
        dz[:, :w] = dc * candidate * into * (1 - into)
        dz[:, w : 2 * w] = dc * c * forget * (1 - forget)
        dz[:, 2 * w : 3 * w] = dh * tanh_c * out * (1 - out)
        dz[:, 3 * w :] = dc * into * (1 - candidate * candidate)
        np.add.at(self.gradients["input"], self.streams[i], dz)
        before = dz @ p["recurrent"].T, dc * forget
        self._noted = k + 1
        if self._noted == self._block or i == 0:
            self._add_noted()
        return before

    def _add_noted(self) -> None:
        """Add the outer products noted since the last time."""
        g, rows = self.gradients, slice(self._noted)
        vocabulary = len(g["bias"])
        logits = self._logit_adjoints[rows].reshape(-1, vocabulary)
        g["output"] += self._hidden_after[rows].reshape(-1, self.width).T @ logits
        g["bias"] += logits.sum(axis=0)
        gates = self._gate_adjoints[rows].reshape(-1, 4 * self.width)
        g["recurrent"] += self._hidden_before[rows].reshape(-1, self.width).T @ gates
        self._noted = 0

    def chain(self) -> FunctionChain[State, State]:
        """Return the computation of a sweep."""
        return FunctionChain(self.step, self.adjoint_step)

    def durable_chain(self) -> FunctionChain[State, Adjoint]:
        """Return the same computation, its sums part of the adjoint; see `durable_adjoint`.

        A durable run writes the adjoint and nothing else: sums kept beside it
        would begin at zero when the run is resumed.
        """

        def adjoint_step(state: State, adjoint: Adjoint, i: int) -> Adjoint:
            self.take(adjoint)
            before = self.adjoint_step(state, (adjoint["h"], adjoint["c"]), i)
            return self._with_sums(before)

        return FunctionChain(self.step, adjoint_step)

    def durable_adjoint(self) -> Adjoint:
        """Return the adjoint of the last state, and sums that are zero; call `clear` before."""
        for rows in self._noted_rows().values():
            rows[...] = 0
        return self._with_sums(self.start())

    def _noted_rows(self) -> dict[str, Array]:
        return {
            "noted_before": self._hidden_before,
            "noted_after": self._hidden_after,
            "noted_gates": self._gate_adjoints,
            "noted_logits": self._logit_adjoints,
        }

    def _with_sums(self, state: State) -> Adjoint:
        counts = np.array([self.loss, self._noted], np.float64)
        sums = {"h": state[0], "c": state[1], "counts": counts}
        return sums | self.gradients | self._noted_rows()

    def take(self, adjoint: Adjoint) -> None:
        """Go on with the sums in an adjoint, which may be one that was read from a disk."""
        for name, mine in (self.gradients | self._noted_rows()).items():
            if adjoint[name] is not mine:
                mine[...] = adjoint[name]
        self.loss, self._noted = float(adjoint["counts"][0]), int(adjoint["counts"][1])

    def update(self, characters: int, rate: float) -> None:
        """Take one step of Adam (Kingma & Ba 2015) on the mean loss per character."""
        self._updates += 1
        t = self._updates
        for name, parameter in self.parameters.items():
            gradient = self.gradients[name] / characters
            m, v = self._moments[name], self._squares[name]
            m += 0.1 * (gradient - m)
            v += 0.001 * (gradient * gradient - v)
            parameter -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def build(steps: int, width: int, batch: int, dtype: Any, seed: int = 0) -> LSTM:
    """Return an LSTM on the standard library's source, `batch` streams of `steps` characters."""
    for name, value in (("steps", steps), ("width", width), ("batch", batch)):
        if value < 1:
            raise ArgumentError(f"{name}={value} must be at least 1")
    streams, vocabulary = encode(standard_library((steps + 1) * batch), batch)
    return LSTM(streams, vocabulary, width, dtype, seed)


def gradients_of(model: LSTM) -> dict[str, Array]:
    """Return copies of the parameter gradients."""
    return {name: gradient.copy() for name, gradient in model.gradients.items()}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One forward and reverse sweep of the comparison."""

    planner: str
    seconds: float
    report: Report
    gradients: dict[str, Array]


def sweep_once(model: LSTM, steps: int, **options: Any) -> Sweep:
    """Run one sweep under a planner and a memory limit of its own."""
    model.clear()
    with Reversal(model.chain(), n_steps=steps, **options) as run:
        began = time.perf_counter()
        run.forward(model.start())
        zero = model.start()
        run.reverse(zero)
        seconds = time.perf_counter() - began
        return Sweep(options["planner"], seconds, run.report(), gradients_of(model))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a command-line parser."""
    parser.add_argument("--n-steps", type=int, default=2_500, help="sequence length (2500)")
    parser.add_argument("--width", type=int, default=256, help="width of the layer (256)")
    parser.add_argument("--batch", type=int, default=32, help="parallel streams of text (32)")
    parser.add_argument(
        "--memory",
        default="32 slots",
        help="fast memory for checkpoints: bytes, '64 MiB' or '32 slots' (32 slots)",
    )
    parser.add_argument(
        "--tiers",
        default=None,
        help="slow tier: file:///scratch or memory: (a folder under --output)",
    )
    parser.add_argument(
        "--planner", default="auto", choices=["auto", *PLANNERS], help="planner (auto)"
    )
    parser.add_argument("--sweeps", type=int, help="training sweeps (4; 1 with --durable)")
    parser.add_argument(
        "--durable",
        type=Path,
        help="folder that keeps the sweep: after a kill the same command goes on where it was",
    )
    parser.add_argument("--rate", type=float, default=0.004, help="learning rate of Adam (0.004)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for page, picture and trace",
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo: measure, plan, train, report, compare."""

    def say(text: str = "") -> None:
        if not args.json:
            print(text, flush=True)

    if args.sweeps is None:
        args.sweeps = 4 if args.durable is None else 1
    if args.sweeps < 1:
        raise ArgumentError(f"sweeps={args.sweeps} must be at least 1")
    if args.durable is not None and (args.sweeps > 1 or args.tiers is not None):
        raise ArgumentError(
            "--durable keeps one sweep and is its tier: leave --sweeps and --tiers out"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    model = build(args.n_steps, args.width, args.batch, np.float32, args.seed)
    layout = Layout.of(model.start())
    every = format_bytes(args.n_steps * layout.nbytes)
    slots = Budget.parse(args.memory).slots_for(layout.nbytes)
    say(
        f"Text: {args.batch} streams of {args.n_steps} characters of the standard library's source."
        f"\nLSTM: width {args.width}; one state is {format_bytes(layout.nbytes)}, all of them "
        f"{every}; fast memory for checkpoints: {format_bytes(slots * layout.nbytes)}."
    )
    with tempfile.TemporaryDirectory(prefix="tier-", dir=args.output) as scratch:
        tier = args.tiers or f"file:{Path(scratch).resolve()}"
        results = _train(args, model, tier, say)
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    return 0


def _measured(model: LSTM, steps: int, tier: str, progress: bool | None) -> Costs:
    from ..backends.urls import open_store

    costs = measure(
        model.chain(),
        model.start(),
        steps,
        open_store(tier),
        adjoint=model.start(),
        seconds=2.0,
        progress=progress,
    )
    model.clear()
    return costs


def _say_costs(costs: Costs, say: Any) -> None:
    assert costs.tier is not None
    for what, seconds in (
        ("forward step      T_A", costs.forward_step_s),
        ("adjoint step      T_B", costs.turn_s),
        ("write of a state  T_W", costs.tier.write_s),
        ("read of a state   T_R", costs.tier.read_s),
        ("a write's cost to the computing thread", costs.tier.write_overhead_s),
        ("a read's cost to the computing thread", costs.tier.read_overhead_s),
    ):
        say(f"{what:<40}{format_seconds(seconds):>10}")


def _reversal(args: argparse.Namespace, model: LSTM, tier: str, say: Any) -> Reversal[State, Any]:
    """Return the sweeps to train by, their costs measured."""
    say("\n== Measure")
    options = {
        "n_steps": args.n_steps,
        "memory": args.memory,
        "planner": args.planner,
        "progress": shown(args),
    }
    if args.durable is None:
        costs = _measured(model, args.n_steps, tier, shown(args))
        _say_costs(costs, say)
        return Reversal(model.chain(), tiers=tier, costs=costs, **options)
    label = f"lstm of width {args.width}, batch {args.batch}, seed {args.seed}"
    if args.durable.exists():
        say(f"{args.durable}: {inspect(args.durable).reason}.")
    reversal: Reversal[State, Any] = Reversal(
        model.durable_chain(),
        durable=args.durable,
        durable_label=label,
        durable_every_s=1.0,
        **options,
    )
    _say_costs(reversal.prepare(model.start()).costs, say)
    return reversal


def _train(args: argparse.Namespace, model: LSTM, tier: str, say: Any) -> dict[str, Any]:
    characters = args.n_steps * args.batch
    losses: list[float] = []
    first: dict[str, Array] = {}
    with _reversal(args, model, tier, say) as reversal, told_if_stopped(reversal):
        say("\n== Plan and train")
        costs = reversal.costs
        for sweep in range(args.sweeps):
            model.clear()
            reversal.forward(model.start())
            if not sweep:
                say(f"{reversal.plan}\n")
            if args.durable is None:
                reversal.reverse(model.start())
            else:
                model.take(reversal.reverse(model.durable_adjoint()))
            losses.append(model.loss / characters)
            report = reversal.report()
            rate = characters / report.makespan_s
            if report.n_steps < args.n_steps:
                say(f"resumed: {report.n_steps} adjoint steps were left")
            say(
                f"sweep {sweep + 1}: loss {losses[-1]:.4f} per character, "
                f"{format_seconds(report.makespan_s)}, {rate:,.0f} characters/s"
            )
            if sweep == args.sweeps - 1:
                first = gradients_of(model)  # the comparison runs at these weights
            else:
                model.update(characters, args.rate)

    say(f"\n== Predicted and measured (last sweep)\n{report}")
    picture, trace = args.output / "timeline.svg", args.output / "trace.json"
    report.trace(trace)
    report.save(args.output / "report.html")
    drawn = [str(args.output / "report.html"), f"{trace} (open it at ui.perfetto.dev)"]
    report.picture(picture)
    drawn.insert(0, str(picture))
    say(f"\nWritten: {', '.join(drawn)}")

    say("\n== The same sweep by other means")
    sweeps = [
        sweep_once(
            model, args.n_steps, planner="store-all", memory=f"{args.n_steps} slots", costs=costs
        ),
        sweep_once(model, args.n_steps, planner="revolve", memory=args.memory, costs=costs),
    ]
    rows = [_row(reversal.plan.planner if reversal.plan else "", report, report.makespan_s, True)]
    equal = True
    for other in sweeps:
        same = all(np.array_equal(other.gradients[name], first[name]) for name in first)
        equal &= same
        rows.append(_row(other.planner, other.report, report.makespan_s, same))
    say(
        tabulate(
            rows,
            headers=("planner", "seconds", "relative", "recompute", "fast memory", "gradient"),
            disable_numparse=True,
            stralign="right",
        )
    )
    say("\nThe gradients are equal to the last bit." if equal else "\nTHE GRADIENTS DIFFER.")
    if not equal:
        raise ArgumentError("gradients differ between planners: please report this")
    return {
        "losses": losses,
        "report": report.to_dict(),
        "others": {other.planner: other.report.to_dict() for other in sweeps},
        "gradients_equal": equal,
    }


def _row(planner: str, report: Report, base_s: float, same: bool) -> tuple[str, ...]:
    return (
        planner,
        f"{report.makespan_s:.2f}",
        f"{report.makespan_s / base_s:.2f}",
        f"{report.recompute_factor:.2f}",
        format_bytes(report.peak_fast_bytes),
        "equal" if same else "DIFFERS",
    )
