"""What every benchmark shares: options, the JSON form, interleaving, child processes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from multistage import native

PACKAGES = (
    "numpy",
    "torch",
    "pytorchcv",
    "timm",
    "transformers",
    "pyrevolve",
    "checkpoint_schedules",
    "multistage-checkpointing",
)

# malloc keeps what is freed, as CUDA's allocator does: first touches of pages drown the rest.
KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


def require_core() -> None:
    """End the program if it would measure the Python twins without being asked to.

    Raises
    ------
    SystemExit
        If the C core is not there and MULTISTAGE_CORE is not "off".
    """
    if native.LIBRARY is None and os.environ.get("MULTISTAGE_CORE") != "off":
        raise SystemExit(
            f"this would measure the Python twins: {native.missing()}. In a checkout, compile the "
            "C core with `pip install -e .`; to measure the twins, set MULTISTAGE_CORE=off"
        )


def from_tests(name: str) -> Any:
    """Return a module of `tests/`, such as `oracles.chain_exact`.

    Raises
    ------
    SystemExit
        Outside of a checkout: the tests and their oracles are not installed.
    """
    tests = Path(__file__).parent.parent / "tests"
    if not (tests / name.replace(".", "/")).with_suffix(".py").exists():
        raise SystemExit(
            f"this benchmark compares with {name} of {tests}, which is not there; run it in a "
            "checkout of the repository"
        )
    if str(tests) not in sys.path:
        sys.path.append(str(tests))
    return importlib.import_module(name)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; end where the C core is missing."""
    require_core()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, a minute at most")
    parser.add_argument("--json", type=Path, help="write raw samples and ratios to this file")
    parser.add_argument("--plot", type=Path, help="draw a picture to this file")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, versions."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else ""
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
    }


def finish(
    args: argparse.Namespace,
    name: str,
    samples: Any,
    ratios: dict[str, float],
    left_out: Sequence[str] = (),
) -> None:
    """Print the ratios and write the JSON file."""
    for what in left_out:
        print(f"left out: {what}")
    width = max(map(len, ratios))
    for key, value in ratios.items():
        print(f"{key:<{width}}  {value:.6g}")
    if args.json:
        result = {
            "benchmark": name,
            "quick": args.quick,
            "seed": args.seed,
            "machine": machine(),
            "ratios": ratios,
            "left_out": list(left_out),
            "samples": samples,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def interleaved(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call every run in turn, `repeats` times; return the samples of each.

    Slow drifts of a shared machine so fall on all of them alike.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(run())
    return samples


def child(
    module: str,
    task: dict[str, Any],
    environment: dict[str, str] | None = None,
    stop_s: float | None = None,
) -> Any:
    """Run `python -m module --child TASK` in a fresh process; return the JSON it prints last.

    Raises
    ------
    subprocess.CalledProcessError
        If it fails.
    subprocess.TimeoutExpired
        If it takes longer than `stop_s`.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, "--child", json.dumps(task)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=stop_s,
    )
    return json.loads(done.stdout.splitlines()[-1])


def held_kib(field: str) -> int:
    """Return a line of this process's status: `VmRSS`, memory held, or `VmHWM`, its peak."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0])


def reset_peak() -> None:
    """Reset `VmHWM` to what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
