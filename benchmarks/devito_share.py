"""What a checkpointed gradient of Devito spends outside its two operators.

The acoustic gradient of Devito's own test on 70x80 points, sponge of 40, over
422 steps: `jacobian_adjoint(checkpointing=True)` as it stands, once through
`install()` and once through pyrevolve, in processes of their own.  Counted is
the revolver: made, `apply_forward` and `apply_reverse`, less what passes inside
the `apply` of the two operators.  All gradients are asserted to be that of full
storage bit for bit.

    python -m benchmarks.devito_share [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from typing import Any

from benchmarks._common import child, finish, options

STEPS = 422
ORDERS = (16, 4)  # in space; those of Devito's test
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DEVITO_LOGGING": "ERROR"}


class Outside:
    """Times a revolver and, inside it, its two operators."""

    def __init__(self) -> None:
        self.wall_s = self.inside_s = 0.0

    def revolver(self, kind: Any) -> Any:
        """Return a class like `kind`, timed."""
        outer = self

        class Timed(kind):  # type: ignore[misc]
            def __init__(self, checkpoint: Any, forward: Any, backward: Any, *rest: Any) -> None:
                for operator in (forward, backward):
                    operator.apply = outer.inside(operator.apply)
                with outer:
                    super().__init__(checkpoint, forward, backward, *rest)

            def apply_forward(self) -> None:
                with outer:
                    super().apply_forward()

            def apply_reverse(self) -> None:
                with outer:
                    super().apply_reverse()

        return Timed

    def inside(self, apply: Any) -> Any:
        """Return `apply` of an operator, timed."""
        clock = time.perf_counter

        def timed(t_start: int, t_end: int) -> None:
            began = clock()
            apply(t_start, t_end)
            self.inside_s += clock() - began

        return timed

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter() - self._began


def _run_child(given: dict[str, Any]) -> list[dict[str, float]]:
    if given["ours"]:
        from multistage.interop.pyrevolve import install

        install()
    import numpy as np
    from devito import Function, smooth  # type: ignore[import-not-found]
    from examples.seismic import Receiver  # type: ignore[import-not-found]
    from examples.seismic.acoustic import (  # type: ignore[import-not-found]
        acoustic_setup,
        wavesolver,
    )

    order = given["order"]

    def setup(tn: float) -> Any:
        return acoustic_setup(
            shape=(70, 80),
            spacing=(10.0, 10.0),
            dtype=np.float32,
            kernel="OT2",
            space_order=order,
            nbl=40,
            tn=tn,
        )

    # The solver takes two steps fewer than there are samples in time.
    wave = setup((STEPS + 0.5) * float(setup(10.0).dt))
    model, geometry = wave.model, wave.geometry
    assert geometry.nt - 2 == STEPS
    smooth_vp = Function(name="smooth_vp", grid=model.grid, space_order=order)
    smooth(smooth_vp, model.vp)
    observed = wave.forward()[0]
    predicted, u = wave.forward(vp=smooth_vp, save=True)[:2]
    residual = Receiver(
        name="rec",
        grid=model.grid,
        data=predicted.data - observed.data,
        time_range=geometry.time_axis,
        coordinates=geometry.rec_positions,
    )

    def gradient(checkpointing: bool) -> Any:
        grad = Function(name="grad", grid=model.grid)
        wave.jacobian_adjoint(residual, u, vp=smooth_vp, grad=grad, checkpointing=checkpointing)
        return np.array(grad.data)

    full, kind, samples = gradient(False), wavesolver.Revolver, []
    for _ in range(given["repeats"] + 1):
        outside = Outside()
        wavesolver.Revolver = outside.revolver(kind)
        assert np.array_equal(gradient(True), full), "not the gradient of full storage"
        samples.append({"wall_s": outside.wall_s, "inside_s": outside.inside_s})
    return samples[1:]  # the first loads what the others have


def devito_share(
    quick: bool = False,
) -> tuple[dict[str, float] | None, dict[str, list[dict[str, float]]]]:
    """Return the shares outside the operators by name, None without Devito, and the samples.

    A share is that of the repetition that took least: a machine's other work
    falls on either part.  The peer's is left out where pyrevolve is missing.
    """
    if importlib.util.find_spec("devito") is None:
        return None, {}
    names = {"devito": True}
    if importlib.util.find_spec("pyrevolve") is not None:
        names["pyrevolve"] = False
    samples: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 if quick else 3):
        for order in ORDERS:
            for name, ours in names.items():
                task = {"ours": ours, "order": order, "repeats": 10}
                found = child("benchmarks.devito_share", task, ENVIRONMENT)
                samples.setdefault(f"{name}_order_{order}", []).extend(found)
    ratios = {}
    for name, runs in samples.items():
        best = min(runs, key=lambda run: run["wall_s"])
        label, _, order_name = name.partition("_order_")
        tail = "" if int(order_name) == ORDERS[0] else f"_order_{order_name}"
        ratios[f"{label}_outside_share{tail}"] = 1 - best["inside_s"] / best["wall_s"]
    return ratios, samples


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run_child(json.loads(args.child))))
        return
    ratios, samples = devito_share(args.quick)
    if ratios is None:
        print("left out: devito is not installed")
        return
    left_out = [] if "pyrevolve_outside_share" in ratios else ["pyrevolve: not installed"]
    finish(args, "devito_share", samples, ratios, left_out)


if __name__ == "__main__":
    main()
