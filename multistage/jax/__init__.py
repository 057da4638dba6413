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

from .handlers import LoopReport, clear, last_report
from .loop import scan

__all__ = ["LoopReport", "clear", "last_report", "scan"]
