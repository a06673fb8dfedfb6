"""What callers may use: keys, quotas, rates, turns, and constraints that compile in time."""
