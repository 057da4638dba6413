"""Planners for chains of unequal stages."""
