"""What tokens cost: dollars per million tokens, and the volume from which an own machine is cheaper than a service."""

from __future__ import annotations

import math

HOURS_PER_MONTH = 730.0


def per_million(dollars_per_hour: float, tokens_per_second: float) -> float:
    """Dollars per million tokens on a machine that makes ``tokens_per_second`` all the time."""
    return dollars_per_hour / (tokens_per_second * 3600) * 1e6


def break_even(fixed: float, service: float, own: float = 0.0) -> float:
    """Tokens from which ``fixed`` dollars are repaid, if a million tokens cost ``service`` dollars there, and here
    ``own`` dollars on top of the fixed ones. Infinite where a token costs no less here."""
    return fixed / (service - own) * 1e6 if service > own else math.inf
