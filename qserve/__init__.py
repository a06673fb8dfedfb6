"""qserve: quantize a language model, prove what it cost, and serve it.

The names below are imported on first use, so that ``import qserve`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qserve.checkpoint.card import QualityCard
    from qserve.checkpoint.errors import QServeError
    from qserve.checkpoint.spec import QuantSpec
    from qserve.runtime.llm import LLM
    from qserve.runtime.sampling import SamplingParams

# In a source tree this folder hides an installed qserve; its other packages are then found there all the same.
__path__ = extend_path(__path__, __name__)

__version__ = "0.1.0"
__all__ = ["LLM", "QServeError", "QualityCard", "QuantSpec", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "qserve.runtime.llm",
    "QServeError": "qserve.checkpoint.errors",
    "QualityCard": "qserve.checkpoint.card",
    "QuantSpec": "qserve.checkpoint.spec",
    "SamplingParams": "qserve.runtime.sampling",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qserve' has no attribute {name!r}")
