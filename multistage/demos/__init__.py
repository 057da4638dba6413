"""The demos of the command line."""
