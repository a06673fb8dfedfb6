"""Mixed precision: a scheme for each linear, chosen by what its rounding costs the model's predictions."""

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.quantize.mixed, not as {__name__}")
