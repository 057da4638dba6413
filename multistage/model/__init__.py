"""What the user gives: a chain, what it costs, its tiers, and how much memory it may use."""
