"""Loops of JAX, in compiled programs, whose states go to slow tiers.

Examples
--------
>>> import jax, jax.numpy as jnp
>>> import multistage.jax as mjax
>>> def loss(w, xs):
...     def step(c, x):
...         return jnp.tanh(w * c + x), None
...     last, _ = mjax.scan(step, jnp.zeros(()), xs, memory="1 MiB", tiers="memory:")
...     return last
>>> gradient = jax.jit(jax.grad(loss))(0.5, jnp.ones(1000))
>>> print(f"{gradient:.4f}", mjax.last_report().steps)
0.1974 1000
"""

from typing import TYPE_CHECKING

from .handlers import LoopReport, clear, last_report
from .scanning import scan

if TYPE_CHECKING:
    from .solving import MultistageAdjoint

__all__ = ["LoopReport", "MultistageAdjoint", "clear", "last_report", "scan"]


def __getattr__(name: str) -> object:
    """Import what needs diffrax once it is asked for."""
    if name != "MultistageAdjoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .solving import MultistageAdjoint

    return MultistageAdjoint
