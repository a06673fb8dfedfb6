"""Serving: requests, KV blocks, the scheduler, models, the engine and the HTTP server."""

if not __name__.startswith("qserve."):
    raise ImportError(f"import this package as qserve.runtime, not as {__name__}")
