"""The benchmarks that `benchmarks.all` runs, what they need and how long they may take."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """A benchmark: the module `benchmarks.NAME`.

    Attributes
    ----------
    name, title : str
    items : str
        Figures and tables of the papers it is the counterpart of; "" for ours.
    needs : tuple of str
        Packages, or "cuda" for a CUDA device.
    quick : tuple of str
        Options beside `--quick`.
    environment : dict
        Beside the caller's.
    expected_s : int
        What `--quick` takes on two quiet cores, roughly.
    quick_s, full_s : int
        Seconds after which it is stopped and counts as failed.
    short : bool
        Whether `scripts/bench-node` runs it.
    """

    name: str
    title: str
    items: str = ""
    needs: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    expected_s: int = 30
    quick_s: int = 900
    full_s: int = 7200
    short: bool = False


ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

CATALOG: tuple[Entry, ...] = (
    Entry(
        "async_model",
        "Timelines, memory and makespans of the asynchronous strategy, in virtual time",
        "Kukreja et al., figures 1 and 2, performance model",
        expected_s=15,
    ),
    Entry(
        "recompute_factor",
        "Recompute factors over the number of steps, s = 100",
        "Kukreja et al., figure 3",
        expected_s=30,
    ),
    Entry(
        "lstm_depth",
        "Peak memory and time of an LSTM over its depth, measured",
        "Kukreja et al., figures 4 and 5",
        expected_s=90,
        short=True,
    ),
    Entry(
        "chain_theorem",
        "Operations, persistency and theorem 1 against exhaustive search",
        "Beaumont et al., table 1, figure 2, theorem 1",
        expected_s=12,
    ),
    Entry("house", "The state of the source: lengths, import cycles, types", expected_s=5),
    Entry(
        "late_tier",
        "Sweeps on a tier that turns slow, beside no tier and beside waiting",
        expected_s=110,
    ),
    Entry(
        "striped_store",
        "A tier striped over two paths, beside each of them",
        expected_s=60,
    ),
    Entry(
        "shared_store",
        "10 000 ranks on one store, with plans that count on a fair part of it, in virtual time",
        expected_s=40,
    ),
    Entry(
        "unequal_steps",
        "Steps of unequal cost and states of unequal size, NumPy",
        expected_s=45,
    ),
    Entry(
        "chain_networks",
        "The networks of the paper, planned from profiles",
        "Beaumont et al., figures 3 to 13, solver times",
        expected_s=80,
        needs=("torch", "pytorchcv"),
    ),
    Entry(
        "chain_throughput",
        "Throughput against peak memory, measured",
        "Beaumont et al., figures 3 to 13, prediction errors",
        expected_s=80,
        needs=("torch",),
        # One network and one thread: a minute or two instead of ten.
        quick=("--nets", "residual"),
        environment=ONE_THREAD,
        short=True,
    ),
    Entry(
        "joint_run",
        "Chains with a slow tier, trained beside plans without one and torch's own ways",
        "",
        expected_s=60,
        needs=("torch",),
        environment=ONE_THREAD,
    ),
    Entry(
        "jax_scan",
        "Loops of JAX within a limit, beside JAX's own ways",
        expected_s=150,
        needs=("jax",),
        environment=ONE_THREAD,
    ),
    Entry(
        "pyadjoint_tiers",
        "A tape of pyadjoint within a limit, beside pyadjoint's own ways",
        expected_s=40,
        needs=("pyadjoint",),
        environment=ONE_THREAD,
    ),
    Entry(
        "chain_solver",
        "Seconds and memory of the chain solver",
        "Beaumont et al., section 5.2",
        expected_s=6,
    ),
    Entry("planner_grid", "Planners beside a lower bound and the exact optimum", expected_s=12),
    Entry(
        "joint_planner",
        "Plans of chains with a slow tier beside a lower bound and the exact optimum",
        expected_s=75,
    ),
    Entry(
        "driver_overhead",
        "Seconds per step of the driver alone",
        expected_s=12,
        needs=("pyrevolve", "checkpoint_schedules"),
    ),
    Entry("overlap", "Transfers hidden behind compute", expected_s=30, short=True),
    Entry("store_engine", "The file store's engines beside the disk", expected_s=180),
    Entry(
        "planner_speed",
        "Synchronous hierarchies: planning time and makespans",
        expected_s=45,
        needs=("pyrevolve", "checkpoint_schedules"),
    ),
    Entry(
        "pde_adjoint",
        "The adjoint of a wave beside peers",
        expected_s=90,
        needs=("pyrevolve", "checkpoint_schedules"),
    ),
    Entry("torch_lstm", "A PyTorch LSTM beside torch's own ways", expected_s=100, needs=("torch",)),
    Entry(
        "zoo",
        "Models of timm and transformers and recurrent cells, within limits",
        expected_s=120,
        needs=("torch", "timm", "transformers"),
        environment=ONE_THREAD,
    ),
    Entry(
        "device_overlap",
        "Copies between a CUDA device and pinned memory",
        expected_s=20,
        needs=("torch", "cuda"),
        short=True,
    ),
    Entry(
        "devito_share", "A Devito gradient outside its operators", expected_s=40, needs=("devito",)
    ),
)


def missing(entry: Entry) -> str:
    """Return what an entry needs and is not here, as a sentence; "" if nothing."""
    for need in entry.needs:
        if need == "cuda":
            if not cuda():
                return "no CUDA device is here"
        elif importlib.util.find_spec(need) is None:
            return f"{need} is not installed"
    return ""


def cuda() -> bool:
    """Whether torch finds a CUDA device; asked in a process of its own, since torch is large."""
    if importlib.util.find_spec("torch") is None:
        return False
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0
