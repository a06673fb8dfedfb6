"""``MixedPrecision``: the choice of schemes over a job: measure once, choose, and choose again where it missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.parts import Keep, Part
from qserve.checkpoint.spec import WeightScheme
from qserve.quantize.forecast import GATHERED, measures_compensated
from qserve.quantize.mixed.allocate import Tried, allocate
from qserve.quantize.mixed.probe import scheme_of
from qserve.quantize.mixed.sensitivity import Compensation, Sensitivities, Sensitivity, excerpt, measure
from qserve.quantize.prepare import Preparation
from qserve.quantize.report import ProgressEvent

# For the smallest checkpoint within a divergence: the most attempts, and the share of the limit that is close enough.
_ATTEMPTS, _CLOSE = 4, 0.85


@dataclass(frozen=True)
class Assignment:
    """A scheme for each linear, the reasons in sentences, and what was tried. It outlives the process as JSON.

    ``schemes`` holds None for linears that are kept in 16-bit floats.
    """

    schemes: dict[str, WeightScheme | None]
    reasons: tuple[str, ...]
    predicted_kl: float
    bits_per_weight: float
    tried: tuple[Tried, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Assignment:
        return cls(**{
            **content,
            "schemes": {name: scheme_of(each) for name, each in content["schemes"].items()},
            "reasons": tuple(content["reasons"]),
            "tried": tuple(Tried(**fields) for fields in content["tried"]),
        })  # fmt: skip


class MixedPrecision:
    """``windows`` int64 [samples, length] is the calibration text, ``offload`` a directory for hidden states.

    Call ``measure`` and ``choose``, or ``resume`` with the state of an interrupted run; then ``after`` with what was
    measured of each ``assignment``.
    """

    def __init__(
        self, prepared: Preparation, windows: Tensor, tell: Callable[[ProgressEvent], None], offload: Path | None = None
    ) -> None:
        self._prepared, self._windows, self._tell, self._offload = prepared, windows, tell, offload
        self._job = prepared.job
        self._sensitivities: Sensitivities = ()
        self._measured: tuple[Tried, ...] = ()
        self._assignment: Assignment | None = None
        # Attempts count from 1. The factor corrects predictions by earlier measurements.
        self._attempt, self._factor = 1, 1.0
        self._passed: Assignment | None = None  # the smallest that passed, if another was tried after it
        self._last = False
        self._notes: tuple[str, ...] = ()

    @property
    def assignment(self) -> Assignment:
        """The last assignment."""
        assert self._assignment is not None
        return self._assignment

    @property
    def tried(self) -> tuple[Tried, ...]:
        return (*self.assignment.tried, *self._measured)

    def to_json(self) -> dict[str, Any]:
        """The state, for ``resume``."""
        return {
            "assignment": self.assignment.to_json(),
            "sensitivities": [each.to_json() for each in self._sensitivities],
            "measured": [asdict(each) for each in self._measured],
            "attempt": self._attempt,
            "factor": self._factor,
            "notes": self._notes,
            "limit": self._job.max_kl,
            "passed": self._passed and self._passed.to_json(),
            "last": self._last,
        }

    def resume(self, content: dict[str, Any]) -> None:
        """Take over the choice of an interrupted run, and the data for another choice. With another limit than that
        run had, there are as many attempts as at first, and none has passed."""
        self._assignment = Assignment.from_json(content["assignment"])
        self._sensitivities = tuple(Sensitivity.from_json(each) for each in content["sensitivities"])
        self._measured = tuple(Tried(**each) for each in content["measured"])
        self._attempt, self._factor = content["attempt"], content["factor"]
        self._notes = tuple(content["notes"])
        if content["limit"] == self._job.max_kl:
            self._passed = content["passed"] and Assignment.from_json(content["passed"])
            self._last = content["last"]
        else:
            self._attempt = 1

    def choose(self) -> None:
        found = allocate(
            self._sensitivities,
            target_bits=self._job.target_bits,
            max_kl=self._job.max_kl,
            calibration_factor=self._factor,
        )
        self._assignment = Assignment(
            found.schemes,
            (*found.lines(), *self._notes),
            found.predicted_kl,
            found.bits_per_weight,
            found.tried,
        )

    def after(self, card: QualityCard, passed: bool) -> Literal["done", "again", "smaller", "back"]:
        """What follows the measurement of the last choice, which ``passed`` its gates or not: nothing; another choice,
        after one that passed a ``smaller`` one; or going ``back`` to the one that passed. ``assignment`` is then that.

        Where a size was asked for, nothing. Otherwise the measurement corrects the predictions. Too much divergence
        leads to another attempt; so does, once, much less than allowed.
        """
        if self._last:
            return "done"
        assignment, limit, found = self.assignment, self._job.max_kl, card.end("kl_mean", "high")
        label = f"measured, attempt {self._attempt}" if limit is not None else "measured"
        self._measured += (Tried(label, assignment.bits_per_weight, card.kl_mean, measured=True),)
        if limit is None:
            return "done"
        passed = passed and found <= limit
        if self._attempt < _ATTEMPTS and self._chose_again(found, passed, limit):
            if passed:
                self._passed = assignment
            return "smaller" if passed else "again"
        before = self._passed
        if before is None or (passed and assignment.bits_per_weight <= before.bits_per_weight):
            return "done"
        self._assignment, self._last = before, True
        return "back"

    def _chose_again(self, found: float, passed: bool, limit: float) -> bool:
        """Make another choice if the divergence ``found`` asks for it, and there is one within the limit."""
        if found <= limit and (not passed or self._attempt > 1 or found >= _CLOSE * limit):
            return False
        if self.assignment.predicted_kl > 0:
            # If the corrected prediction failed again, raise it a little beyond the measurement.
            self._factor *= found / self.assignment.predicted_kl * (1.0 if self._attempt == 1 else 1.05)
        self._attempt += 1
        before = self.assignment
        try:
            self.choose()
        except UsageError:
            if passed or self._passed is not None:
                return False
            raise
        return not passed or self.assignment.schemes != before.schemes

    def measure(self, kept: Part | None, keep: Keep) -> None:
        """Measure the sensitivities to choose by. Goes on from ``kept``, the state of an earlier run, with the kind of
        measurement that run could afford, and gives ``keep`` the state for a later run."""
        prepared, job = self._prepared, self._job
        compensated = measures_compensated(job, prepared.skeleton) if kept is None else kept.extra["compensated"]
        follows = bool(job.float_samples)
        compensation = Compensation(self._windows[:GATHERED], job.act_order, follows) if compensated else None
        if job.algorithm.compensates and not compensated:
            self._notes = ("chosen as for rounding to nearest: what gptq needs for a block does not fit the memory",)
        elif job.activations is not None and job.algorithm.search_scale is not None:
            self._notes = ("chosen as for rounding to nearest: outliers that are moved into weights still count",)
        self._sensitivities = measure(
            prepared.skeleton,
            excerpt(self._windows),
            prepared.offered,
            around=job.target_bits or 4.25,
            symmetric_zeros=prepared.format.symmetric_zeros,
            activations=job.activations,
            compensation=compensation,
            offload=self._offload,
            progress=lambda done, total: self._tell(ProgressEvent("sensitivity", done, total)),
            kept=kept,
            keep=lambda states, so_far: keep(states, {**so_far, "compensated": compensated}),
        )
