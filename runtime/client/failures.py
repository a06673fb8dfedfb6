"""Why a generation ended that should not have."""

from __future__ import annotations


class EngineFailure(Exception):
    """The engine could not go on with a generation. ``str(error)`` may be shown to the client."""


class DeadlineExceeded(EngineFailure):
    """The request was not done within its ``timeout``."""
