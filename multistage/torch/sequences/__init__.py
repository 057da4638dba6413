"""A cell run over a sequence, in chunks that are planned."""
