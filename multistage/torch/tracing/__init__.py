"""The stages of a model that was not written as a chain, found while it runs."""
