"""Planners that use fast memory alone."""
