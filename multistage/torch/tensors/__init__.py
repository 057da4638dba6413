"""Tensors: where their bytes lie, what states are made of them, and whether two are equal."""
