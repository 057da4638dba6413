"""Measurements of a chain and its stores, before a plan is made."""
