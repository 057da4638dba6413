"""What a stage or a cell finds around it: captured, put back, and compared."""
