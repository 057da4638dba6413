"""A character LSTM in NumPy, trained by full backpropagation through a long text.

    python examples/lstm_numpy.py --quick
    python examples/lstm_numpy.py --n-steps 20000 --memory "32 slots" --tiers file:///scratch

Shows the whole use of `Reversal` on code of one's own: a step, its adjoint step, a
budget and a slow tier.  The states of the sequence do not fit the budget; those that
do not are streamed to a file while the loop runs.  The first gradient is compared
with that of a plain loop that keeps every state.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import multistage as ms

Array = np.ndarray[Any, Any]
State = tuple[Array, Array]  # h and c, each of shape (batch, width)


class LSTM:
    """One layer and a softmax over the next character; `text` has shape (steps + 1, batch)."""

    def __init__(self, text: Array, characters: int, width: int) -> None:
        rng = np.random.default_rng(0)
        self.text, self.characters, self.width = text, characters, width
        shapes = {"W": (characters, 4 * width), "U": (width, 4 * width), "V": (width, characters)}
        self.weights = {name: 0.1 * rng.standard_normal(shape) for name, shape in shapes.items()}
        self.clear()

    def clear(self) -> None:
        self.loss = 0.0
        self.gradients = {name: np.zeros_like(w) for name, w in self.weights.items()}

    def start(self) -> State:
        shape = self.text.shape[1], self.width
        return np.zeros(shape), np.zeros(shape)

    def gates(self, state: State, i: int) -> list[Array]:
        """Return input, forget and output gate, and candidate, of reading character i."""
        z = self.weights["W"][self.text[i]] + state[0] @ self.weights["U"]
        *sigmoid, candidate = np.split(z, 4, axis=1)
        return [*(1 / (1 + np.exp(-x)) for x in sigmoid), np.tanh(candidate)]

    def step(self, state: State, i: int) -> State:
        """Return the state after reading character i."""
        a, f, o, g = self.gates(state, i)
        c = f * state[1] + a * g
        return o * np.tanh(c), c

    def adjoint_step(self, state: State, adjoint: State, i: int) -> State:
        """Return the adjoint before step i from the state there; add loss and gradients."""
        a, f, o, g = self.gates(state, i)
        c = f * state[1] + a * g
        h = o * np.tanh(c)
        scores = h @ self.weights["V"]
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        rows, target = np.arange(len(p)), self.text[i + 1]
        self.loss -= float(np.log(p[rows, target]).sum())
        p[rows, target] -= 1
        dh = adjoint[0] + p @ self.weights["V"].T
        dc = adjoint[1] + dh * o * (1 - np.tanh(c) ** 2)
        dz = [dc * g * a * (1 - a), dc * state[1] * f * (1 - f)]
        dz += [dh * np.tanh(c) * o * (1 - o), dc * a * (1 - g**2)]
        d = np.concatenate(dz, axis=1)
        self.gradients["V"] += h.T @ p
        self.gradients["U"] += state[0].T @ d
        np.add.at(self.gradients["W"], self.text[i], d)
        return d @ self.weights["U"].T, dc * f


def store_all(model: LSTM, steps: int) -> dict[str, Array]:
    """Return the gradients of a plain loop that keeps every state."""
    model.clear()
    states = [model.start()]
    for i in range(steps):
        states.append(model.step(states[-1], i))
    adjoint = model.start()
    for i in reversed(range(steps)):
        adjoint = model.adjoint_step(states[i], adjoint, i)
    return model.gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-steps", type=int, default=4_000, help="length of the text (4000)")
    parser.add_argument("--width", type=int, default=96, help="width of the layer (96)")
    parser.add_argument("--batch", type=int, default=16, help="parallel streams of text (16)")
    parser.add_argument("--sweeps", type=int, default=4, help="training steps (4)")
    parser.add_argument("--memory", default="24 slots", help="fast memory (24 slots)")
    parser.add_argument("--tiers", help="slow tier (a folder for temporary files)")
    parser.add_argument("--quick", action="store_true", help="a short text, a few seconds")
    args = parser.parse_args()
    if args.quick:
        args.n_steps, args.width, args.batch, args.sweeps = 600, 32, 8, 3

    source = Path(argparse.__file__).read_bytes() * (1 + args.n_steps * args.batch // 90_000)
    letters, text = np.unique(np.frombuffer(source, np.uint8), return_inverse=True)
    text = text[: (args.n_steps + 1) * args.batch].reshape(args.batch, -1).T
    model = LSTM(text, len(letters), args.width)

    with (
        tempfile.TemporaryDirectory() as scratch,
        ms.Reversal(
            model.step,
            model.adjoint_step,
            args.n_steps,
            memory=args.memory,
            tiers=args.tiers or f"file:{scratch}",
        ) as run,
    ):
        first: dict[str, Array] = {}
        speed = {name: np.zeros_like(w) for name, w in model.weights.items()}
        for sweep in range(args.sweeps):
            model.clear()
            run.forward(model.start())
            run.reverse(model.start())
            if sweep == 0:
                first = model.gradients
                print(run.plan)
                equal = store_all(model, args.n_steps)
                if not all(np.array_equal(first[name], equal[name]) for name in first):
                    raise SystemExit("the gradients differ")
            print(f"sweep {sweep + 1}: {model.loss / text[1:].size:.4f} nats a character")
            for name, weight in model.weights.items():
                norm = np.sqrt((model.gradients[name] ** 2).mean())
                speed[name] = 0.8 * speed[name] - 0.01 * model.gradients[name] / norm
                weight += speed[name]
        print(run.report())
    print("The gradient equals that of store-all, bit for bit.")


if __name__ == "__main__":
    main()
