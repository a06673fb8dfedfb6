"""``backend_for``: which backend serves a model."""

from __future__ import annotations

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.families import native_families
from qserve.checkpoint.source import ModelSource
from qserve.runtime.backend import Backend
from qserve.runtime.config import EngineConfig
from qserve.runtime.models.config import decoder_config
from qserve.runtime.native_backend import NativeBackend
from qserve.runtime.parallel.support import option


def backend_for(source: ModelSource, config: EngineConfig) -> Backend:
    """The backend that ``config`` insists on; else the native one where it computes ``source``, else transformers.

    Raises ``UsageError`` where several ranks are asked of the second.
    """
    if config.backend == "native":
        return NativeBackend()
    why = "--backend transformers asks for it"
    if config.backend == "auto":
        try:
            decoder_config(source.config, source.name)
            return NativeBackend()
        except CheckpointError as error:
            kind = source.config.get("model_type")
            known = isinstance(kind, str) and kind in native_families()
            why = str(error) if known else f"the native decoder does not serve the type {kind}"
    if config.num_ranks > 1:
        raise UsageError(f"{option(config)} is served by the native backend alone: {why}")
    from qserve.runtime.transformers_backend import TransformersBackend  # imports much of transformers

    return TransformersBackend(why)
