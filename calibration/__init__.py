"""Calibration text and the statistics of layer inputs, one decoder block in memory at a time."""

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.calibration, not as {__name__}")
