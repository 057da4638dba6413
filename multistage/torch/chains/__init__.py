"""A chain of stages, run forward and backward by a plan."""
