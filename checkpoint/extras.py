"""What a plain install leaves out, and the extra that brings it."""

from __future__ import annotations

from importlib.util import find_spec

from qserve.checkpoint.errors import QServeError

EXTRAS = {"matplotlib": "reports", "httpx": "chat", "sentencepiece": "sentencepiece", "s3fs": "s3", "gcsfs": "gs",
          "ray": "ray"}  # fmt: skip
"""Package -> the extra of qserve-llm that installs it."""


def require(package: str, purpose: str) -> None:
    """Raise ``QServeError``, which says what to install, where ``package`` is missing. It is not imported."""
    if find_spec(package) is None:
        extra = EXTRAS[package]
        raise QServeError(f"{purpose} needs {package}, which is not installed: pip install 'qserve-llm[{extra}]'")
