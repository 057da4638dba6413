"""Devito's acoustic gradient through our revolvers is that of full storage, bit for bit.

In processes of their own: `install()` must come before Devito, and its import
warns and compiles.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("devito") is None, reason="needs devito"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler"),
]

ROOT = Path(__file__).parent.parent.parent

SETUP = """
import sys
import numpy as np
from multistage import Costs, Tier
from multistage.interop import pyrevolve as ours
from multistage.interop.pyrevolve import operators, revolvers

tier, dtype = sys.argv[1], np.dtype(sys.argv[2]).type
ours.install(**dict(OPTIONS))
from devito import CheckpointOperator, DevitoCheckpoint, Function, Revolver, TimeFunction, smooth
from examples.seismic import Receiver
from examples.seismic.acoustic import acoustic_setup

wave = acoustic_setup(
    shape=(50, 60), spacing=(10.0, 10.0), nbl=10, tn=300.0, space_order=4, dtype=dtype
)
model, geometry = wave.model, wave.geometry
start = Function(name="start", grid=model.grid, space_order=4, dtype=dtype)
smooth(start, model.vp)
observed = wave.forward()[0]
predicted, whole = wave.forward(vp=start, save=True)[:2]
residual = Receiver(
    name="rec", grid=model.grid, data=predicted.data - observed.data, dtype=dtype,
    time_range=geometry.time_axis, coordinates=geometry.rec_positions,
)
steps = geometry.nt - 2
full = np.array(wave.jacobian_adjoint(residual, whole, vp=start)[0].data)
assert full.dtype == dtype and abs(full).max() > 0


def written_out(wanted=DevitoCheckpoint):
    '''Return u, v and grad, and what a revolver is made of.'''
    u = TimeFunction(name="u", grid=model.grid, time_order=2, space_order=4)
    v = TimeFunction(name="v", grid=model.grid, time_order=2, space_order=4)
    grad = Function(name="grad", grid=model.grid)
    given = {"u": u, "dt": wave.dt, **model.physical_params(vp=start)}
    forward = CheckpointOperator(wave.op_fwd(save=False), src=geometry.src, **given)
    backward = CheckpointOperator(
        wave.op_grad(save=False), v=v, rec=residual, grad=grad, **given
    )
    return (u, v, grad), (wanted([u]), forward, backward)
"""


def run(code: str, *args: str, install: str = "") -> str:
    """Run code after SETUP; `install` are the options of `install()`."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP.replace("OPTIONS", install) + code, *args],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DEVITO_LOGGING": "ERROR",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        cwd=args[0].removeprefix("file://"),  # beside our examples, Devito's would not be found
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long(but="float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_jacobian_adjoint_streams_and_is_exact(dtype: str, tmp_path: Path) -> None:
    code = """
reports = []
plain = revolvers.BaseRevolver.apply_reverse
def recorded(self):
    plain(self)
    reports.append(self.report())
revolvers.BaseRevolver.apply_reverse = recorded

grad = wave.jacobian_adjoint(residual, None, vp=start, checkpointing=True)[0]
assert np.array_equal(grad.data, full)
(report,) = reports
print(report.counts.writes, report.counts.reads, report.counts.lost, report.plan.slots)
"""
    # A tier that was measured on a busy machine might be too slow to be used.
    costs = 'Costs(1e-3, 1e-3, tape_step_s=1e-3, tiers=(Tier("file", 1e-3, 1e-3),))'
    options = f'memory="6 slots", tiers=tier, planner="streaming", costs={costs}'
    out = run(code, f"file://{tmp_path}", dtype, install=options)
    writes, reads, lost, slots = map(int, out.split()[-4:])
    assert writes > 0
    assert reads > 0
    assert lost == 0
    assert slots == 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_install_serves_devito_and_revolvers_are_reusable(tmp_path: Path) -> None:
    run(
        """
grad = wave.jacobian_adjoint(residual, None, vp=start, checkpointing=True)[0]
assert np.array_equal(grad.data, full)

fields, made = written_out()
for options in (
    {}, {"memory": "4 slots", "tiers": "memory:"}, {"memory": "4 slots", "tiers": tier}
):
    with ours.Revolver(*made, None, steps, **options) as revolver:
        for _ in range(2):
            for field in fields:
                field.data_with_halo[:] = 0
            revolver.apply_forward()
            revolver.apply_reverse()
            assert np.array_equal(fields[2].data, full), options
with ours.DiskRevolver(*made, 5, steps, filedir=tier.removeprefix("file://")) as revolver:
    for field in fields:
        field.data_with_halo[:] = 0
    revolver.apply_forward()
    revolver.apply_reverse()
    assert np.array_equal(fields[2].data, full)
""",
        f"file://{tmp_path}",
        "float32",
    )


@pytest.mark.long
def test_arrays_are_looked_up_once_per_time_level(tmp_path: Path) -> None:
    run(
        """
calls = []
plain = DevitoCheckpoint.get_data
def counted(self, timestep):
    calls.append(timestep)
    return plain(self, timestep)
DevitoCheckpoint.get_data = counted

class Own(DevitoCheckpoint):  # of which nothing is known
    def get_data(self, timestep):
        return super().get_data(timestep)

for kind in (DevitoCheckpoint, Own):
    (u, v, grad), made = written_out(kind)
    with ours.Revolver(*made, 6, steps) as revolver:
        for sweep in range(2):
            calls.clear()
            for field in (u, v, grad):
                field.data_with_halo[:] = 0
            revolver.apply_forward()
            revolver.apply_reverse()
            assert np.array_equal(grad.data, full)
            if kind is DevitoCheckpoint:
                assert len(calls) == u.time_size, calls
            else:
                assert len(calls) > steps
""",
        f"file://{tmp_path}",
        "float64",
    )
