"""Helpers that know nothing of schedules: numbers, units, progress bars, interrupts."""
