"""Quantization methods and the pipeline that writes a checkpoint."""

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.quantize, not as {__name__}")
