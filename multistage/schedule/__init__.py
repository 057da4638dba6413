"""Schedules: what makes one legal, and how long it takes in virtual time."""
