"""Planners that write to a slow tier while the steps run."""
