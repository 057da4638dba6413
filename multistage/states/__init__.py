"""States: how one is laid out, shared, copied and kept in fast memory."""
