"""What is on disk: specifications, packed weights, format readers and writers, the quality card."""

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.checkpoint, not as {__name__}")
