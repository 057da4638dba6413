"""Slow tiers for tensors: records of bytes, and the threads and streams that carry them."""
