"""Plans of a chain within a memory limit: made for each kind of input, chosen, and run."""
