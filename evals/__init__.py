"""What a checkpoint costs in quality and gives in speed: measurements, gates and reports."""

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.evals, not as {__name__}")
