"""Limits of what callers may use: keys, quotas, rates, turns, and constraints that compile in time."""
