"""What the stages of a chain do and cost, measured and checked on a sample."""
