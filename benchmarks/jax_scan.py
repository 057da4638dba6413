"""`multistage.jax.scan` beside JAX's own ways: CPU time of a step and peak memory.

Two loops: a GRU on 16 characters (states of 8 KiB), and a wave on 512 x 512 points (states of
2 MiB).  `ours` is `multistage.jax.scan` inside of `jit`, `eager` outside of it; `sqrt` is
`jax.lax.scan` under `jax.checkpoint`, in blocks of about the root of the number of steps, `plain`
without, which keeps all residuals, and `equinox` its checkpointed loop with the same memory, where
it is installed.

Every method has several processes of its own, which take turns with those of the others, all in
one environment and with the same flags of XLA; each runs its program some times, and its gradient
is compared with that of `sqrt`.  Time is that of the processor, all threads included, and the
least of all runs; what ours needs to learn the costs of a loop, its first run, is left out, as is
the compilation of all.  Memory is the most that any run holds beyond what the process held before
it, the first run included, over the budget.

Beside these a solve of diffrax with `MultistageAdjoint`, over `RecursiveCheckpointAdjoint`; a step
of training with Adam, jitted and its arguments donated, over the same with `jax.lax.scan`; how
often a program is traced for each of five lengths; and what the thread that runs a program needs
to save 8 KiB, by a loop that saves before each step and one that does not.

    python -m benchmarks.jax_scan [--quick] [--only PART ...] [--long] [--json FILE] [--plot FILE]

`growth` compares longer loops with shorter ones, by the first run of a process each; with `--long`,
10^6 steps of the GRU with 10^4.  Of the memory of more steps, ys and their gradients, 8 bytes a
step, are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._common import child, finish, held_kib, options, reset_peak

BUDGETS = {"gru": 12 << 20, "wave": 48 << 20}
STEPS = {"gru": (10_000, 100_000), "wave": (8_000, 16_000)}
QUICK_STEPS = {"gru": (2_000, 10_000), "wave": (200, 800)}
TITLES = {"gru": "GRU, states of 8 KiB", "wave": "wave, states of 2 MiB"}
LABELS = {
    "sqrt": "scan, √n checkpoint",
    "ours": "multistage, in jit",
    "eager": "multistage, outside of jit",
    "equinox": "equinox, same limit",
    "plain": "scan, all residuals",
}
METHODS = ("sqrt", "ours", "eager", "equinox", "plain")
PARTS = ("gru", "wave", "growth", "others")
PROCESSES = {"gru": 3, "wave": 2, "growth": 3, "others": 3}  # of a method
RUNS = {"gru": 3, "wave": 1, "solve": 3, "train": 3}  # of a process, its first left out
LONG_STEPS = 1_000_000
SOLVE_STEPS, QUICK_SOLVE_STEPS = 10_000, 1_000
LENGTHS = (100, 200, 300, 400, 500)
# What XLA allocates for a program goes back to the system, whatever thread ran it, or peaks would
# depend on that.  The 128 KiB that a product of matrices takes must not: that doubles the time of
# a step in runs that have them at the end of the heap, which differs from run to run.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 19),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 26),
    "OMP_NUM_THREADS": "1",
}
YS = 8  # bytes of a step's y and its gradient
MOST_PLAIN = {"gru": 10_000, "wave": 0}  # steps whose residuals fit
SAVES, SAVE_ROUNDS = 200, 300  # states of 8 KiB that fit in the buffers of a tier


def problem(name: str, steps: int) -> tuple[Callable[..., Any], Any, Any, Any]:
    """Return a step `f(carry, x, parameters)`, state 0, the inputs and the parameters."""
    import jax
    import jax.numpy as jnp

    if name == "wave":
        points = 512
        t = jnp.arange(steps, dtype=jnp.float32)
        source = jnp.sin(0.1 * t) * jnp.exp(-(((t - 50) / 30) ** 2))

        def wave(carry: Any, x: Any, speed: Any) -> Any:
            before, now = carry
            wide = jnp.pad(now, 1)
            sides = wide[2:, 1:-1] + wide[:-2, 1:-1] + wide[1:-1, 2:] + wide[1:-1, :-2]
            after = 2 * now - before + speed * (sides - 4 * now)
            after = after.at[points // 2, points // 2].add(x)
            return (now, after), (after[20] ** 2).sum()

        zeros = jnp.zeros((points, points))
        return wave, (zeros, zeros), source, jnp.full((points, points), 0.2)
    width, symbols, batch = 128, 64, 16
    key = jax.random.key(0)
    shapes: dict[str, tuple[int, ...]]
    shapes = {"x": (symbols, 3 * width), "h": (width, 2 * width), "c": (width, width)}
    shapes |= {"b": (3 * width,), "out": (width, symbols)}
    names = enumerate(shapes.items())
    parameters = {
        what: jax.random.normal(jax.random.fold_in(key, k), shape) / 12
        for k, (what, shape) in names
    }
    text = jax.random.randint(key, (steps, batch), 0, symbols, jnp.int32)

    def gru(h: Any, symbol: Any, p: Any) -> Any:
        given = jax.nn.one_hot(symbol, symbols) @ p["x"] + p["b"]
        gates = jax.nn.sigmoid(given[:, : 2 * width] + h @ p["h"])
        update, reset = jnp.split(gates, 2, 1)
        fresh = jnp.tanh(given[:, 2 * width :] + (reset * h) @ p["c"])
        h = (1 - update) * h + update * fresh
        logits = jax.nn.log_softmax(h @ p["out"])
        return h, -jnp.take_along_axis(logits, symbol[:, None], 1).mean()

    return gru, jnp.zeros((batch, width)), text, parameters


def loss(method: str, name: str, steps: int, folder: str) -> tuple[Callable[..., Any], Any]:
    """Return the sum of a loop's ys as a function of the parameters, and these."""
    import jax
    import jax.numpy as jnp

    import multistage.jax as mjax

    f, init, xs, parameters = problem(name, steps)

    def ours(p: Any) -> Any:
        options: Any = {"memory": BUDGETS[name], "tiers": f"file:{folder}"}
        return mjax.scan(lambda c, x: f(c, x, p), init, xs, **options)[1].sum()

    def plain(p: Any) -> Any:
        return jax.lax.scan(lambda c, x: f(c, x, p), init, xs)[1].sum()

    def sqrt(p: Any) -> Any:
        size = round(steps**0.5)
        while steps % size:
            size -= 1
        inner = jax.checkpoint(lambda c, part: jax.lax.scan(lambda c, x: f(c, x, p), c, part))
        parts = xs.reshape(steps // size, size, *xs.shape[1:])
        return jax.lax.scan(inner, init, parts)[1].sum()

    def equinox(p: Any) -> Any:
        loops: Any = importlib.import_module("equinox.internal")
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(init))

        def body(made: Any) -> Any:
            i, carry, total = made
            carry, y = f(carry, xs[i], p)
            return i + 1, carry, total + y

        return loops.while_loop(
            lambda made: made[0] < steps,
            body,
            (jnp.int32(0), init, jnp.float32(0)),
            kind="checkpointed",
            max_steps=steps,
            checkpoints=max(2, BUDGETS[name] // state_bytes),
        )[2]

    found: Callable[..., Any] = {
        "ours": ours, "eager": ours, "plain": plain, "sqrt": sqrt, "equinox": equinox
    }[method]  # fmt: skip
    return found, parameters


def timed(run: Callable[[], Any], runs: int, steps: int) -> tuple[Any, list[float]]:
    """Return what the last run gives, and the microseconds of the processor a step of each."""
    jax: Any = importlib.import_module("jax")
    found, us = None, []
    for _ in range(runs):
        began = time.process_time()
        found = jax.block_until_ready(run())
        us.append(1e6 * (time.process_time() - began) / steps)
    return found, us


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Run one method; return microseconds a step, bytes, and sums of the gradient."""
    jax: Any = importlib.import_module("jax")
    import multistage.jax as mjax

    # Or XLA may free what a program worked in only when the next one has begun.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with tempfile.TemporaryDirectory(prefix="jax-scan-", dir=".") as folder:
        steps, method = task["steps"], task["method"]
        function, parameters = loss(method, task["problem"], steps, folder)
        run = jax.value_and_grad(function)
        compiled = run if method == "eager" else jax.jit(run).lower(parameters).compile()
        few, _ = loss("plain", task["problem"], 4, folder)
        jax.block_until_ready(jax.jit(jax.grad(few))(parameters))  # what any program takes
        if method == "eager":
            jax.block_until_ready(run(parameters))  # compiles, as was done for the others
        held = held_kib("VmRSS")
        reset_peak()
        learns = method == "ours" and not task["first"]
        found, us = timed(lambda: compiled(parameters), task["runs"] + learns, steps)
        value, gradient = found
        return {
            "us_per_step": us[learns:],
            "peak_bytes": 1024 * (held_kib("VmHWM") - held),
            "loss": float(value),
            "gradient": [float(abs(leaf).sum()) for leaf in jax.tree.leaves(gradient)],
            "report": str(mjax.last_report()) if method in ("ours", "eager") else "",
        }


def solved(task: dict[str, Any]) -> dict[str, Any]:
    """Solve a differential equation; return microseconds a step, and sums of the gradient."""
    diffrax: Any = importlib.import_module("diffrax")
    import jax
    import jax.numpy as jnp

    import multistage.jax as mjax

    weights = jax.random.normal(jax.random.key(0), (128, 128)) / 12
    start, steps = jnp.ones((16, 128)) / 2, task["steps"]
    with tempfile.TemporaryDirectory(prefix="jax-scan-", dir=".") as folder:
        adjoint = (
            mjax.MultistageAdjoint(memory=BUDGETS["gru"], tiers=f"file:{folder}")
            if task["method"] == "ours"
            else diffrax.RecursiveCheckpointAdjoint(checkpoints=BUDGETS["gru"] // start.nbytes)
        )

        def loss(w: Any) -> Any:
            return (
                diffrax.diffeqsolve(
                    diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w) - y),
                    diffrax.Heun(),
                    0.0,
                    10.0,
                    10.0 / steps,
                    start,
                    args=w,
                    adjoint=adjoint,
                    max_steps=2 * steps,
                ).ys
                ** 2
            ).sum()

        run = jax.jit(jax.value_and_grad(loss))
        (value, gradient), us = timed(lambda: run(weights), 1 + RUNS["solve"], steps)
    return {
        "us_per_step": us[1:],
        "loss": float(value),
        "gradient": [float(abs(gradient).sum())],
    }


def trained(task: dict[str, Any]) -> dict[str, Any]:
    """Train a GRU for some steps; return microseconds a time step, and the last loss."""
    optax: Any = importlib.import_module("optax")
    import jax

    optimiser = optax.adam(1e-3)
    with tempfile.TemporaryDirectory(prefix="jax-scan-", dir=".") as folder:
        function, parameters = loss(task["method"], "gru", task["steps"], folder)

        def train(p: Any, state: Any) -> Any:
            value, gradient = jax.value_and_grad(function)(p)
            updates, state = optimiser.update(gradient, state)
            return optax.apply_updates(p, updates), state, value

        run = jax.jit(train, donate_argnums=(0, 1))
        made = [(parameters, optimiser.init(parameters), None)]

        def step() -> Any:
            made[:] = [run(*made[0][:2])]
            return made[0]

        (*_, value), us = timed(step, 1 + RUNS["train"], task["steps"])
    return {"us_per_step": us[1:], "loss": float(value), "gradient": []}


def of_calls(_task: dict[str, Any]) -> dict[str, Any]:
    """Return how often a program is traced for each of five lengths."""
    import jax
    import jax.numpy as jnp

    import multistage.jax as mjax

    traced = []

    def run(c: Any, xs: Any) -> Any:
        traced.append(1)
        options: Any = {"memory": "7 slots", "tiers": "memory:"}
        return mjax.scan(lambda c, x: (jnp.sin(c) + x, None), c, xs, **options)[0].sum()

    start = jnp.ones(2048)
    grad = jax.jit(jax.grad(run))
    for length in LENGTHS:
        for scale in (1.0, 2.0, 3.0):
            jax.block_until_ready(grad(start, scale * jnp.ones(length)))
    return {"compilations": len(traced) / len(LENGTHS)}


def of_saves(_task: dict[str, Any]) -> dict[str, Any]:
    """Return the microseconds of the thread that runs a program to save a state of 8 KiB."""
    import jax
    import jax.numpy as jnp

    import multistage.jax as mjax
    from multistage.jax import handlers

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # programs run in this thread
    start, zero, steps = jnp.ones(2048), jnp.uint32(0), jnp.int32(SAVES)

    def program(saves: bool) -> Any:
        def run(c: Any) -> Any:
            site = handlers.Site(*handlers.opened("memory:"), SAVES, 1, 1, 4 << 20)
            number, every = site.begin((c,))

            def step(k: Any, made: Any) -> Any:
                token, witness, c = made
                if saves:
                    token, witness = handlers.save(number, token, k, witness, (c,))
                return token, witness, c * c

            made = jax.lax.fori_loop(0, steps, step, (zero, jnp.zeros(()), c))
            ends = number, made[0], jnp.int32(0), steps, every
            return made, site.load(ends, made[1], (c,))

        return jax.jit(run)

    programs = {saves: program(saves) for saves in (False, True)}
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(SAVE_ROUNDS):
        for saves, run in programs.items():
            began = time.thread_time()
            jax.block_until_ready(run(start))
            seconds = time.thread_time() - began
            if mjax.last_report().kept == saves * (SAVES - 1):  # none was left out
                best[saves] = min(best[saves], seconds)
    return {"us_to_save_8_kib": 1e6 * (best[True] - best[False]) / (SAVES - 1)}


CHILDREN = {"solve": solved, "train": trained, "calls": of_calls, "saves": of_saves}


def in_turn(tasks: dict[str, dict[str, Any]], processes: int) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of some tasks, of fresh processes that take turns."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for _ in range(processes):
        for name, task in tasks.items():
            samples[name].append(child("benchmarks.jax_scan", task, ENVIRONMENT))
    return samples


def least_us(samples: list[dict[str, Any]]) -> float:
    """Return the microseconds a step of the fastest run."""
    return float(min(us for sample in samples for us in sample["us_per_step"]))


def most_bytes(samples: list[dict[str, Any]]) -> int:
    """Return the highest peak."""
    return int(max(sample["peak_bytes"] for sample in samples))


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two methods gave one loss and one gradient, up to rounding."""
    pairs = zip([one["loss"], *one["gradient"]], [other["loss"], *other["gradient"]], strict=True)
    return all(abs(a - b) <= 2e-3 * abs(b) for a, b in pairs)


def require_close(found: dict[str, list[dict[str, Any]]], method: str) -> None:
    """Raise AssertionError for a gradient that is not that of a method."""
    for name, samples in found.items():
        for sample in samples:
            assert close(sample, found[method][0]), f"{name} has another gradient than {method}"


def loops(
    name: str, quick: bool, left_out: list[str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Return samples and ratios of all methods for a loop."""
    steps = (QUICK_STEPS if quick else STEPS)[name][0]
    if not importlib.util.find_spec("equinox"):
        left_out.append(f"{name} by equinox: it is not installed")
    tasks = {
        method: {
            "method": method, "problem": name, "steps": steps, "runs": RUNS[name], "first": False
        }
        for method in METHODS
        if (method != "equinox" or importlib.util.find_spec("equinox"))
        and (method != "plain" or steps <= MOST_PLAIN[name])
    }  # fmt: skip
    found = in_turn(tasks, 1 if quick else PROCESSES[name])
    require_close(found, "sqrt")
    us = {method: least_us(samples) for method, samples in found.items()}
    ratios: dict[str, float] = {}
    for method in us.keys() - {"ours", "eager"}:
        ratios[f"{name}_over_{method}"] = us["ours"] / us[method]
        ratios[f"{name}_eager_over_{method}"] = us["eager"] / us[method]
    for method, prefix in (("ours", ""), ("eager", "_eager"), ("sqrt", "_sqrt")):
        peak = most_bytes(found[method])
        ratios[f"{name}{prefix}_peak_over_budget"] = peak / BUDGETS[name]
    return found, dict(sorted(ratios.items()))


def growth(quick: bool, long: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Return samples and ratios of longer loops and shorter ones."""
    samples: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for name, (few, many) in (QUICK_STEPS if quick else STEPS).items():
        many = LONG_STEPS if long and name == "gru" else many
        task = {"method": "ours", "problem": name, "runs": 1, "first": True}
        shorter = in_turn({"shorter": task | {"steps": few}}, 1 if quick else PROCESSES["growth"])
        found = shorter | in_turn({"longer": task | {"steps": many}}, 1)
        samples[name] = found
        us = {
            which: statistics.mean(one["us_per_step"][0] for one in some)
            for which, some in found.items()
        }
        ratios[f"{name}_time_growth"] = us["longer"] / us["shorter"]
        longer_bytes = most_bytes(found["longer"]) - YS * (many - few)
        ratios[f"{name}_peak_growth"] = longer_bytes / most_bytes(found["shorter"])
    return samples, ratios


def others(quick: bool, left_out: list[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return samples and ratios of what is not a loop alone."""
    samples: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    steps = QUICK_SOLVE_STEPS if quick else SOLVE_STEPS
    for what, package, name, methods in (
        ("solve", "diffrax", "diffrax_over_recursive", ("ours", "recursive")),
        ("train", "optax", "training_step_over_scan", ("ours", "plain")),
    ):
        if not importlib.util.find_spec(package):
            left_out.append(f"{what}: {package} is not installed")
            continue
        tasks = {each: {"problem": what, "method": each, "steps": steps} for each in methods}
        found = samples[what] = in_turn(tasks, 1 if quick else PROCESSES["others"])
        require_close(found, methods[1])
        us, other_us = (least_us(found[method]) for method in methods)
        ratios[name] = us / other_us
    for what in ("calls", "saves"):
        samples[what] = child("benchmarks.jax_scan", {"problem": what}, ENVIRONMENT)
        ratios |= samples[what]
    return samples, ratios


def _plot(samples: dict[str, Any], steps: dict[str, int], path: Path) -> None:
    from matplotlib.figure import Figure

    names = [name for name in BUDGETS if name in samples]
    if not names:
        return
    figure = Figure(figsize=(4.5 * len(names), 3.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        found = samples[name]
        mebi = {method: most_bytes(some) / 2**20 for method, some in found.items()}
        for k, method in enumerate(METHODS):
            if method not in found:
                continue
            us, is_ours = least_us(found[method]), method in ("ours", "eager")
            axes.plot(
                mebi[method], us, "o" if is_ours else "s", color=f"C{k}", label=LABELS[method]
            )
        axes.axvline(BUDGETS[name] / 2**20, color="0.6", lw=1, ls="--", label="limit")
        axes.set(
            title=f"{TITLES[name]}, {steps[name]:,} steps",
            xlabel="peak memory, MiB",
            ylabel="processor time of a step, µs",
        )
        axes.set_xlim(min(*mebi.values(), BUDGETS[name] / 2**20) / 2, 2 * max(mebi.values()))
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.15 * max(map(least_us, found.values())))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure all, print the ratios."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help="growth to 10^6 steps of the GRU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts of it")
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        print(json.dumps(CHILDREN.get(task["problem"], measured)(task)))
        return
    left_out: list[str] = []
    samples: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for part in args.only:
        if part == "growth":
            samples[part], more = growth(args.quick, args.long)
        elif part == "others":
            samples[part], more = others(args.quick, left_out)
        else:
            samples[part], more = loops(part, args.quick, left_out)
        ratios |= more
    if args.plot:
        steps = {name: few for name, (few, _) in (QUICK_STEPS if args.quick else STEPS).items()}
        _plot(samples, steps, args.plot)
    finish(args, "jax_scan", samples, ratios, left_out)


if __name__ == "__main__":
    main()
