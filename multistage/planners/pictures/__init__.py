"""Pages and pictures of plans."""
