"""`multistage.jax.scan` beside JAX's own ways: CPU time of a step and peak memory.

Two loops: a GRU on 16 characters (states of 8 KiB), and a wave on 512 x 512 points (states of
2 MiB).  Every run is a process of its own, its gradient compared with that of
`jax.lax.scan` under `jax.checkpoint`, in blocks of about the root of the number of steps
(`sqrt`); `eager` is `multistage.jax.scan` outside of `jit`, `plain` is `jax.lax.scan`, which keeps
all residuals, and `equinox` its
checkpointed loop with the same memory, where it is installed.  Time is that of the processor, the
threads of the tier included, and the least of some runs; memory is the most that a run holds
beyond what the process held before it, over the budget.

Beside these a solve of diffrax with `MultistageAdjoint`, over `RecursiveCheckpointAdjoint`; a step
of training with Adam, jitted and its arguments donated, over the same with `jax.lax.scan`; how
often a program is traced for each of five lengths; and what the thread that runs a program needs
to save 8 KiB, by a loop that saves before each step and one that does not.

    python -m benchmarks.jax_scan [--quick] [--long] [--json FILE] [--plot FILE]

`--long` compares 10^4 steps of the GRU with 10^6.  Of the memory of more steps, ys and their
gradients, 8 bytes a step, are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks._common import child, finish, held_kib, options, reset_peak

BUDGETS = {"gru": 12 << 20, "wave": 48 << 20}
STEPS = {"gru": (10_000, 100_000), "wave": (8_000, 16_000)}
QUICK_STEPS = {"gru": (2_000, 10_000), "wave": (200, 800)}
METHODS = ("sqrt", "ours", "eager", "equinox", "plain")
REPEATS = 3
LONG_STEPS = 1_000_000
SOLVE_STEPS, QUICK_SOLVE_STEPS = 10_000, 1_000
LENGTHS = (100, 200, 300, 400, 500)
# Large blocks go back to the system: XLA allocates its memory by whatever thread runs a program.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
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


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Run one method; return microseconds a step, bytes, compilations, and sums of the gradient."""
    jax: Any = importlib.import_module("jax")
    import multistage.jax as mjax

    # Or XLA may free what a program worked in only when the next one has begun.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with tempfile.TemporaryDirectory(prefix="jax-scan-", dir=".") as folder:
        steps = task["steps"]
        function, parameters = loss(task["method"], task["problem"], steps, folder)
        run = jax.value_and_grad(function)
        compiled = jax.jit(run).lower(parameters).compile() if task["method"] != "eager" else run
        few, _ = loss("plain", task["problem"], 4, folder)
        jax.block_until_ready(jax.jit(jax.grad(few))(parameters))  # what any program takes
        if task["method"] == "eager":
            jax.block_until_ready(run(parameters))  # compiles, as was done for the others
        held = held_kib("VmRSS")
        reset_peak()
        seconds = []
        for _ in range(REPEATS):
            began = time.process_time()
            value, gradient = jax.block_until_ready(compiled(parameters))
            seconds.append(time.process_time() - began)
        return {
            "us_per_step": 1e6 * min(seconds) / steps,
            "mean_us_per_step": 1e6 * sum(seconds[1:]) / (REPEATS - 1) / steps,
            "peak_bytes": 1024 * (held_kib("VmHWM") - held),
            "loss": float(value),
            "gradient": [float(abs(leaf).sum()) for leaf in jax.tree.leaves(gradient)],
            "report": str(mjax.last_report()) if task["method"] in ("ours", "eager") else "",
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
        seconds = []
        for _ in range(REPEATS + 1):
            began = time.process_time()
            value, gradient = jax.block_until_ready(run(weights))
            seconds.append(time.process_time() - began)
    return {
        "us_per_step": 1e6 * min(seconds[1:]) / steps,
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
        state, seconds = optimiser.init(parameters), []
        for _ in range(REPEATS + 1):
            began = time.process_time()
            parameters, state, value = jax.block_until_ready(run(parameters, state))
            seconds.append(time.process_time() - began)
    us = 1e6 * min(seconds[1:]) / task["steps"]
    return {"us_per_step": us, "loss": float(value), "gradient": []}


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


def others(steps: int, left_out: list[str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return samples and ratios of what is not a loop alone."""
    samples: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for what, package, name, methods in (
        ("solve", "diffrax", "diffrax_over_recursive", ("ours", "recursive")),
        ("train", "optax", "training_step_over_scan", ("ours", "plain")),
    ):
        if not importlib.util.find_spec(package):
            left_out.append(f"{what}: {package} is not installed")
            continue
        found = samples[what] = {
            method: child(
                "benchmarks.jax_scan",
                {"problem": what, "method": method, "steps": steps},
                ENVIRONMENT,
            )
            for method in methods
        }
        ours, other = (found[method] for method in methods)
        assert close(ours, other), f"{what}: another gradient"
        ratios[name] = ours["us_per_step"] / other["us_per_step"]
    for what in ("calls", "saves"):
        samples[what] = child("benchmarks.jax_scan", {"problem": what}, ENVIRONMENT)
        ratios |= samples[what]
    return samples, ratios


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two methods gave one loss and one gradient, up to rounding."""
    pairs = zip([one["loss"], *one["gradient"]], [other["loss"], *other["gradient"]], strict=True)
    return all(abs(a - b) <= 2e-3 * abs(b) for a, b in pairs)


def main() -> None:
    """Measure all, print the ratios."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help="10^6 steps of the GRU")
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        print(json.dumps(CHILDREN.get(task["problem"], measured)(task)))
        return
    left_out = [] if importlib.util.find_spec("equinox") else ["equinox: it is not installed"]
    methods = [each for each in METHODS if each != "equinox" or not left_out]
    samples: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for name, (few, many) in (QUICK_STEPS if args.quick else STEPS).items():
        many = LONG_STEPS if args.long and name == "gru" else many
        found: dict[str, Any] = {}
        for method in methods:
            if method == "plain" and few > MOST_PLAIN[name]:
                continue
            task = {"method": method, "problem": name, "steps": few}
            found[method] = child("benchmarks.jax_scan", task, ENVIRONMENT)
            assert close(found[method], found["sqrt"]), f"{name}: {method} has another gradient"
        task = {"method": "ours", "problem": name, "steps": many}
        found["longer"] = child("benchmarks.jax_scan", task, ENVIRONMENT)
        samples[name], ours = found, found["ours"]
        for method in methods:
            if method not in ("ours", "eager") and method in found:
                other = found[method]["us_per_step"]
                ratios[f"{name}_over_{method}"] = ours["us_per_step"] / other
                ratios[f"{name}_eager_over_{method}"] = found["eager"]["us_per_step"] / other
        ratios[f"{name}_peak_over_budget"] = ours["peak_bytes"] / BUDGETS[name]
        ratios[f"{name}_eager_peak_over_budget"] = found["eager"]["peak_bytes"] / BUDGETS[name]
        ratios[f"{name}_sqrt_peak_over_budget"] = found["sqrt"]["peak_bytes"] / BUDGETS[name]
        us, longer_us = (found[which]["mean_us_per_step"] for which in ("ours", "longer"))
        ratios[f"{name}_time_growth"] = longer_us / us
        longer_bytes = found["longer"]["peak_bytes"] - YS * (many - few)
        ratios[f"{name}_peak_growth"] = longer_bytes / ours["peak_bytes"]
    more, more_ratios = others(QUICK_SOLVE_STEPS if args.quick else SOLVE_STEPS, left_out)
    samples |= more
    ratios |= more_ratios
    finish(args, "jax_scan", samples, ratios, left_out)


if __name__ == "__main__":
    main()
