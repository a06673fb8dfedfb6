"""What tokens cost: dollars per million of them, and the volume from which an own machine is cheaper than a service."""

from __future__ import annotations

import math

HOURS_PER_MONTH = 730.0


def per_million(dollars_per_hour: float, tokens_per_second: float) -> float:
    """Dollars per million tokens of a machine that makes so many of them, all the time."""
    return dollars_per_hour / (tokens_per_second * 3600) * 1e6


def break_even(fixed: float, service: float, own: float = 0.0) -> float:
    """Tokens from which ``fixed`` dollars are repaid, where a million costs ``service`` dollars there and ``own``
    dollars here beside what is fixed; infinite where a token costs no less here."""
    return fixed / (service - own) * 1e6 if service > own else math.inf
