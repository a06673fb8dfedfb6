"""The errors a user may see, with their exit codes: one line that says what, where, and what to do."""

from __future__ import annotations


class QServeError(Exception):
    """Base of every expected failure. ``str(error)`` is the line shown to the user."""

    exit_code = 1


class UsageError(QServeError):
    """The options contradict each other or the input (exit 2)."""

    exit_code = 2


class CheckpointError(QServeError):
    """A model file or directory is missing, damaged, or of an unsupported kind."""


class DataError(QServeError):
    """Calibration or evaluation text is missing, unreadable or too short."""


class CapacityError(QServeError):
    """Something cannot fit; the message gives the arithmetic and the flag that changes it."""


class GateFailed(QServeError):
    """A quality or throughput gate failed (exit 3)."""

    exit_code = 3
