"""Random chains small enough for the exact search, and tiers whose times are whole."""

import random

from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier


def tiny_chain(seed: int, most: int = 6) -> tuple[StageCosts, Tier]:
    """Return a chain of 3 to `most` stages and a tier.

    Stages are equal, unequal and partly spared, or unequal with overheads, in turn.
    """
    draw, kind = random.Random(seed), seed % 3
    count = draw.randint(3, most)
    write, read = (draw.choice([0.5, 1, 1, 2, 2, 3]) for _ in range(2))
    if draw.random() < 0.5:
        read = write
    unit = 2 if 0.5 in (write, read) else 1  # bytes, so that transfers take whole seconds
    sizes = [unit * (1 if kind == 0 else draw.randint(1, 3)) for _ in range(count + 1)]
    stages = []
    for i in range(1, count + 1):
        tape = sizes[i] + unit * (2 if kind == 0 else draw.randint(0, 4))
        run, back = (1, 2) if kind == 0 else (draw.randint(1, 3), draw.randint(1, 4))
        forward = unit * draw.randint(0, 1) if kind == 2 else 0
        backward = unit * draw.randint(0, 2) if kind == 2 else 0
        spared = float(draw.randint(0, run)) if kind == 1 else 0.0
        overheads = (forward, forward, backward)
        stages.append(Stage(str(i), run, back, sizes[i], tape, sizes[i], *overheads, spared))
    rates = Tier.of_rates(
        1 / write,
        1 / read,
        float(draw.random() < 1 / 3),
        shared=draw.random() < 0.2,
        tapes=draw.random() < 0.9,
    )
    return StageCosts(tuple(stages), sizes[0], sizes[0]), rates
