"""A character-level LSTM in NumPy, trained by full backpropagation through time.

The network of the paper's experiment (Kukreja et al. 2018, section 5): one
layer, softmax over the characters, loss at every step.  One step of the
schedule is one character of each stream.  The state is (h, c); the adjoint
step starts from the state before it, so a state is its own tape.  The text is
the source of Python's standard library, which every machine has.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..model.chain import FunctionChain
from ..support.arrays import Bytes, Reals

State = tuple[Reals, Reals]

# Rows of the matrix products that add up parameter gradients.
_BLOCK_ROWS = 64


class LSTM:
    """One LSTM layer and a softmax over the next character.

    Parameters
    ----------
    streams : uint8, shape (n_steps + 1, batch)
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
        self,
        streams: Bytes,
        vocabulary: int,
        width: int,
        dtype: npt.DTypeLike = np.float64,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.streams = streams
        self.width = width
        self.dtype = np.dtype(dtype)
        self.batch = streams.shape[1]
        scale = 1 / np.sqrt(width)

        def weights(*shape: int) -> Reals:
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

    def _gates(self, h: Reals, i: int) -> tuple[Reals, Reals]:
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
        return self.tape_step(state, i)[0]

    def tape_step(self, state: State, i: int) -> tuple[State, tuple[Reals, ...]]:
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

    def adjoint_of_tape(self, tape: tuple[Reals, ...], adjoint: State, i: int) -> State:
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


def build(n_steps: int, width: int, batch: int, dtype: npt.DTypeLike, seed: int = 0) -> LSTM:
    """Return an LSTM on the standard library's source, `batch` streams of `n_steps` characters."""
    for name, value in (("n_steps", n_steps), ("width", width), ("batch", batch)):
        if value < 1:
            raise ArgumentError(f"{name}={value} must be at least 1")
    if seed < 0:
        raise ArgumentError(f"seed={seed} must not be negative")
    streams, vocabulary = encode(standard_library((n_steps + 1) * batch), batch)
    return LSTM(streams, vocabulary, width, dtype, seed)


def gradients_of(model: LSTM) -> dict[str, Reals]:
    """Return copies of the parameter gradients."""
    return {name: gradient.copy() for name, gradient in model.gradients.items()}


def standard_library(characters: int) -> bytes:
    """Return the first `characters` bytes of the standard library's source, files in order.

    Raises
    ------
    ArgumentError
        If there is not that much of it.
    """
    parts: list[bytes] = []
    have = 0
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if have >= characters:
            break
        parts.append(path.read_bytes())
        have += len(parts[-1])
    if have < characters:
        raise ArgumentError(
            f"{characters} characters wanted, the standard library here has {have}; "
            "use fewer steps or a smaller batch"
        )
    return b"".join(parts)[:characters]


def encode(text: bytes, batch: int) -> tuple[Bytes, int]:
    """Return the text as `batch` parallel streams of character numbers, and how many there are.

    Returns
    -------
    streams : uint8, shape (steps + 1, batch)
        Row i holds the characters of step i, row i + 1 what they should predict.
    vocabulary : int
    """
    used, numbers = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    rows = len(text) // batch
    streams = numbers[: rows * batch].astype(np.uint8).reshape(batch, rows)
    return np.ascontiguousarray(streams.T), len(used)
