"""qserve: quantize a language model, prove what it cost, and serve it.

The names below are imported on first use, so that ``import qserve`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qserve.checkpoint.card import QualityCard
    from qserve.checkpoint.errors import QServeError
    from qserve.checkpoint.spec import QuantSpec
    from qserve.runtime.llm import LLM, LoRARequest
    from qserve.runtime.sampling import SamplingParams

# In the sources these packages are links to the folders at the root. A zip, or a checkout by a git that makes no links,
# has small files in their place, and a wheel built from such a tree lacks the packages.
if not Path(__file__).with_name("runtime").is_dir():
    raise ImportError(
        "this copy of qserve lost its symbolic links (qserve/runtime and five more): "
        "clone it with git, with core.symlinks on, and install it from there"
    )

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "QServeError", "QualityCard", "QuantSpec", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "qserve.runtime.llm",
    "LoRARequest": "qserve.runtime.llm",
    "QServeError": "qserve.checkpoint.errors",
    "QualityCard": "qserve.checkpoint.card",
    "QuantSpec": "qserve.checkpoint.spec",
    "SamplingParams": "qserve.runtime.sampling",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'qserve' has no attribute {name!r}")
