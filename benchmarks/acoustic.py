"""The 2-D acoustic wave equation in NumPy, its exact discrete adjoint, and the misfit of a shot.

Second order in time, fourth order in space, constant density:

    u[i+1] = (2 u[i] - (1 - s) u[i-1] + a (h² lap(u[i]) + f[i])) / (1 + s)

with a = (velocity * step_s / spacing_m)² and a sponge s that grows towards the
edges.  The outermost two rings of cells stay zero (Dirichlet), which makes the
discrete Laplacian its own transpose.

The state holds two time levels in one array of shape (2, rows, columns).
Which of them is the newer one alternates with the step: level i lies at index
i % 2, and a step writes level i + 1 over level i - 1.  So nothing is copied.

The grid is worked through in strips of rows that stay in the cache; every
operation writes to a buffer that is there already.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from multistage import InPlaceChain
from multistage.errors import ArgumentError
from multistage.support.arrays import Reals

Adjoint = tuple[Reals, Reals]

_HALO = 2  # cells the stencil reaches
# dt c / h at which the scheme becomes unstable: 2 over the root of the largest
# eigenvalue of the Laplacian, which is 2 (16/3) for two dimensions.
_STABLE = np.sqrt(3 / 8)
# Bytes of one work buffer of a strip; about seven such pieces are in use at once.
_STRIP_BYTES = 256 << 10
# Sponge: sigma at the edge times its width in cells, growing as the cube of the
# depth.  Of widths 16, 24 and 32 at 10 points to the wavelength, 2.5, 0.9 and
# 0.4 % of the largest amplitude come back, the least of the strengths tried.
_SPONGE = 4.0


class Acoustic2D:
    """One shot: a Ricker source, receivers on a line, data to be matched.

    Parameters
    ----------
    velocity : shape (rows, columns)
        Metres per second; rows are depths.
    n_steps : int
        Time steps.
    spacing_m : float
        Between grid points.
    step_s : float, optional
        Time step; by default 0.8 of the largest stable one.
    frequency_hz : float, optional
        Peak of the Ricker wavelet; by default 10 points to the wavelength
        where the velocity is least.
    source : (row, column), optional
        By default the middle of the row of the receivers.
    receiver_row : int, optional
        Receivers stand in every column of this row between the sponges.
    sponge : int
        Width of the absorbing layer at each edge, in cells.
    dtype : numpy dtype
        float32 or float64.

    Attributes
    ----------
    wavelet : shape (n_steps,)
        The source's f[i].
    recorded, observed : shape (n_steps, receivers)
        Row i holds level i + 1 at the receivers: as the steps have written it,
        and as it should be (zeros at first).

    Raises
    ------
    ArgumentError
        If velocities are not positive, the grid is too small for the sponge,
        the source lies outside, or the time step is unstable.

    Examples
    --------
    >>> model = Acoustic2D(np.full((80, 90), 1500.0), n_steps=90)
    >>> state = model.start()
    >>> model.forward(state, 0, 90)
    >>> round(model.misfit(), 3) == round(0.5 * float((model.recorded ** 2).sum()), 3)
    True
    """

    def __init__(
        self,
        velocity: Reals,
        n_steps: int,
        *,
        spacing_m: float = 10.0,
        step_s: float | None = None,
        frequency_hz: float | None = None,
        source: tuple[int, int] | None = None,
        receiver_row: int | None = None,
        sponge: int = 30,
        dtype: npt.DTypeLike = np.float64,
    ) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ArgumentError(f"dtype={self.dtype} must be float32 or float64")
        if n_steps < 1:
            raise ArgumentError(f"n_steps={n_steps} must be at least 1")
        velocity = np.asarray(velocity, np.float64)
        if velocity.ndim != 2 or not (np.isfinite(velocity) & (velocity > 0)).all():
            raise ArgumentError("velocity must be a 2-D array of finite numbers > 0, in m/s")
        least = 2 * (_HALO + max(0, sponge)) + 3
        if min(velocity.shape) < least or sponge < 0:
            raise ArgumentError(
                f"a grid of {velocity.shape[0]} x {velocity.shape[1]} cells has no room for a "
                f"sponge of {sponge}; it takes {least} cells each way"
            )
        limit = float(_STABLE * spacing_m / velocity.max())
        step_s = 0.8 * limit if step_s is None else step_s
        if not 0 < step_s <= limit:
            raise ArgumentError(
                f"step_s={step_s:g} must lie between 0 and {limit:g}, where the scheme is stable"
            )
        if frequency_hz is None:
            frequency_hz = float(velocity.min()) / (10 * spacing_m)
        row = _HALO + sponge if receiver_row is None else receiver_row
        source = (row, velocity.shape[1] // 2) if source is None else source
        for index, length in ((source[0], 0), (source[1], 1), (row, 0)):
            if not _HALO <= index < velocity.shape[length] - _HALO:
                raise ArgumentError(
                    f"source {source} and receiver_row={row} must lie inside the grid, at least "
                    f"{_HALO} cells from its edges"
                )
        self.shape = velocity.shape[0], velocity.shape[1]
        self.n_steps = n_steps
        self.spacing_m, self.step_s, self.frequency_hz = spacing_m, step_s, frequency_hz
        self.source, self.receiver_row, self.sponge = source, row, sponge
        self.wavelet = self._ricker()
        self.columns = slice(_HALO + sponge, self.shape[1] - _HALO - sponge)
        count = self.columns.stop - self.columns.start
        self.recorded = np.zeros((n_steps, count), self.dtype)
        self.observed = np.zeros((n_steps, count), self.dtype)
        self._set_buffers()
        self.velocity = velocity

    def _set_buffers(self) -> None:
        """Prepare what every step uses: the factors of the sponge, and buffers of a strip."""
        inner = (slice(_HALO, -_HALO),) * 2
        sigma = self._sigma()[inner]
        # u[i+1] = keep u[i-1] + twice u[i] + push (12 h² lap(u[i]) + 12 f[i])
        self._twice = (2 / (1 + sigma)).astype(self.dtype)
        self._keep = (-(1 - sigma) / (1 + sigma)).astype(self.dtype)
        self._damped = 1 / (1 + sigma)
        self._inner = inner
        self._pushed = np.zeros(self.shape, self.dtype)
        width = self.shape[1] - 2 * _HALO
        self._rows = max(1, min(self._keep.shape[0], _STRIP_BYTES // (width * self.dtype.itemsize)))
        self._work = np.empty((3, self._rows, width), self.dtype)

    @property
    def velocity(self) -> Reals:
        """Metres per second, shape (rows, columns); assigning keeps step_s, sponge and source."""
        return self._velocity

    @velocity.setter
    def velocity(self, velocity: Reals) -> None:
        if self.step_s * velocity.max() > _STABLE * self.spacing_m:
            raise ArgumentError(f"step_s={self.step_s:g} is unstable at {velocity.max():g} m/s")
        self._velocity: Reals = velocity
        courant = velocity[self._inner] * (self.step_s / self.spacing_m)
        self._push = (courant**2 * self._damped / 12).astype(self.dtype)

    def _ricker(self) -> Reals:
        t = np.arange(self.n_steps) * self.step_s - 1.2 / self.frequency_hz
        bend = (np.pi * self.frequency_hz * t) ** 2
        return np.asarray((1 - 2 * bend) * np.exp(-bend), self.dtype)

    def _sigma(self) -> Reals:
        rows, columns = (
            np.minimum(np.arange(length), np.arange(length)[::-1]) - _HALO for length in self.shape
        )
        depth = self.sponge - np.minimum(rows[:, None], columns[None, :])
        width = max(1, self.sponge)
        return np.asarray(_SPONGE / width * (np.maximum(depth, 0) / width) ** 3)

    def start(self) -> Reals:
        """Return state 0: two levels at rest."""
        return np.zeros((2, *self.shape), self.dtype)

    def start_adjoint(self) -> Adjoint:
        """Return the adjoint of the last state, zeros (the misfit is inside the steps).

        With it travels the sum that becomes the gradient, of shape (rows, columns).
        """
        return np.zeros((2, *self.shape), self.dtype), np.zeros(self.shape, self.dtype)

    # ------------------------------------------------------------------- steps

    def _strips(self) -> Iterator[tuple[slice, slice, Reals, Reals, Reals]]:
        """Yield rows of the grid, the same rows of the inner arrays, and three work buffers."""
        rows = self._keep.shape[0]
        for first in range(0, rows, self._rows):
            stop = min(rows, first + self._rows)
            work = self._work[:, : stop - first]
            yield slice(first + _HALO, stop + _HALO), slice(first, stop), work[0], work[1], work[2]

    def forward(self, state: Reals, start: int, stop: int) -> None:
        """Run steps start..stop-1 in place; write rows start..stop-1 of `recorded`."""
        for i in range(start, stop):
            self._step(state, i, None)

    def tape(self, state: Reals, i: int) -> Reals:
        """Run step i in place; return what its adjoint needs, one field instead of two levels."""
        kept = np.empty(self._keep.shape, self.dtype)
        self._step(state, i, kept)
        return kept

    def _step(self, state: Reals, i: int, kept: Reals | None) -> None:
        now, new = state[i % 2], state[1 - i % 2]  # new holds level i - 1 still
        for rows, inner, lap, more, _ in self._strips():
            self._acceleration(now, rows, i, lap, more)
            if kept is not None:
                kept[inner] = lap
            level = new[rows, _HALO:-_HALO]
            level *= self._keep[inner]
            np.multiply(now[rows, _HALO:-_HALO], self._twice[inner], out=more)
            level += more
            lap *= self._push[inner]
            level += lap
        self.recorded[i] = new[self.receiver_row, self.columns]

    def _acceleration(self, now: Reals, rows: slice, i: int, out: Reals, more: Reals) -> None:
        """Write 12 h² lap(u[i]) + 12 f[i] of some rows to `out`."""
        _laplacian(now, rows, out, more)
        row, column = self.source
        if rows.start <= row < rows.stop:
            out[row - rows.start, column - _HALO] += 12 * self.wavelet[i]

    def reverse(self, state: Reals, adjoint: Adjoint, i: int) -> Adjoint:
        """Overwrite and return the adjoint of step i, from the state before it."""
        return self._adjoint(adjoint, i, state[i % 2], None)

    def reverse_tape(self, tape: Reals, adjoint: Adjoint, i: int) -> Adjoint:
        """Overwrite and return the adjoint of step i, from its tape."""
        return self._adjoint(adjoint, i, None, tape)

    def _adjoint(self, adjoint: Adjoint, i: int, now: Reals | None, kept: Reals | None) -> Adjoint:
        """Run the transpose of step i.

        With p, q the adjoints of levels i + 1 and i after the step, those of
        levels i and i - 1 before it are q + twice p + 12 h² lap(push p) and
        keep p: as in the step, the second is written over p.
        """
        levels, gradient = adjoint
        p, q = levels[1 - i % 2], levels[i % 2]
        p[self.receiver_row, self.columns] += self.recorded[i] - self.observed[i]
        pushed = self._pushed  # its halo stays zero
        np.multiply(p[self._inner], self._push, out=pushed[self._inner])
        for rows, inner, lap, more, acceleration in self._strips():
            later, level = p[rows, _HALO:-_HALO], q[rows, _HALO:-_HALO]
            _laplacian(pushed, rows, lap, more)
            level += lap
            np.multiply(later, self._twice[inner], out=more)
            level += more
            later *= self._keep[inner]
            if now is not None:
                self._acceleration(now, rows, i, acceleration, more)
                field = acceleration
            else:
                assert kept is not None
                field = kept[inner]
            np.multiply(field, pushed[rows, _HALO:-_HALO], out=more)
            gradient[rows, _HALO:-_HALO] += more
        return adjoint

    # ------------------------------------------------------------------ a shot

    def chain(self, taped: bool = False) -> InPlaceChain[Reals, Adjoint]:
        """Return the computation of a shot.

        Parameters
        ----------
        taped : bool
            Whether an adjoint step starts from one field kept by the forward
            step (half the bytes of a state) or from the state.
        """
        if taped:
            return InPlaceChain(self.forward, self.reverse_tape, self.tape)
        return InPlaceChain(self.forward, self.reverse)

    def misfit(self) -> float:
        """Return half the sum of squared residuals of what was recorded last."""
        residual = (self.recorded - self.observed).astype(np.float64)
        return 0.5 * float((residual * residual).sum())

    def gradient(self, adjoint: Adjoint) -> Reals:
        """Return the derivative of the misfit by the velocity, from the adjoint of state 0."""
        return np.asarray(adjoint[1] * (2 / self.velocity))

    def misfit_at(self, velocity: Reals) -> float:
        """Return the misfit of another velocity model, by a forward sweep alone."""
        kept, recorded = self.velocity, self.recorded
        self.velocity, self.recorded = velocity, np.empty_like(recorded)
        try:
            self.forward(self.start(), 0, self.n_steps)
            return self.misfit()
        finally:
            self.velocity, self.recorded = kept, recorded


def _laplacian(u: Reals, rows: slice, out: Reals, more: Reals) -> None:
    """Write 12 h² times the fourth-order Laplacian of some rows to `out`; `more` is overwritten.

    Weights (-1, 16, -30, 16, -1) each way (Fornberg 1988), symmetric: its transpose is itself.
    """
    a, b, inner = rows.start, rows.stop, slice(_HALO, -_HALO)
    np.add(u[a:b, 1:-3], u[a:b, 3:-1], out=out)
    out += u[a - 1 : b - 1, inner]
    out += u[a + 1 : b + 1, inner]
    out *= 16
    np.add(u[a:b, :-4], u[a:b, 4:], out=more)
    more += u[a - 2 : b - 2, inner]
    more += u[a + 2 : b + 2, inner]
    out -= more
    np.multiply(u[a:b, inner], 60, out=more)
    out -= more


def taylor_test(
    model: Acoustic2D, gradient: Reals, direction: Reals, misfit: float, steps: int = 5
) -> list[tuple[float, float, float]]:
    """Return rows (eps, |J(c + eps d) - J(c)|, |J(c + eps d) - J(c) - eps <gradient, d>|).

    eps is halved from row to row: the first difference halves, the second
    falls to a quarter if the gradient is that of the misfit.
    """
    slope = float((gradient.astype(np.float64) * direction).sum())
    rows = []
    for k in range(steps):
        eps = 0.5**k
        change = model.misfit_at(model.velocity + eps * direction) - misfit
        rows.append((eps, abs(change), abs(change - eps * slope)))
    return rows


def layered(shape: tuple[int, int]) -> tuple[Reals, Reals]:
    """Return a layered velocity model with a lens in it, and what is known of it: the smooth trend.

    Metres per second, rows are depths.
    """
    depth, across = (np.linspace(0, 1, length) for length in shape)
    z, x = depth[:, None], across[None, :]
    smooth = np.broadcast_to(1600 + 1400 * z, shape).copy()
    fold = 0.05 * np.sin(2 * np.pi * x)
    true = smooth + 220 * (z > 0.45 + fold) - 160 * (z > 0.68 - fold / 2)
    true -= 350 * np.exp(-(((z - 0.3) / 0.06) ** 2) - (((x - 0.62) / 0.1) ** 2))
    return true, smooth


def build(
    rows: int,
    columns: int,
    n_steps: int,
    dtype: npt.DTypeLike = np.float64,
    *,
    sponge: int = 30,
    source_column: int | None = None,
) -> Acoustic2D:
    """Return a shot in the smooth model whose data were made with the layered one.

    The source stands among the receivers, in the middle unless a column is given.
    """
    for name, value in (("rows", rows), ("columns", columns)):
        if value < 1:
            raise ArgumentError(f"{name}={value} must be at least 1")
    true, smooth = layered((rows, columns))
    step_s = float(0.8 * _STABLE * 10.0 / max(true.max(), smooth.max()))
    source = None if source_column is None else (_HALO + sponge, source_column)
    model = Acoustic2D(true, n_steps, step_s=step_s, source=source, sponge=sponge, dtype=dtype)
    model.forward(model.start(), 0, n_steps)
    model.observed[...] = model.recorded
    model.velocity = smooth
    return model
