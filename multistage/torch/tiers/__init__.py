"""Slow tiers for tensors: rows of bytes, and the threads and streams that carry them."""
