"""Planners that wait for every transfer."""
