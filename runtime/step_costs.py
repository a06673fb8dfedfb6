"""``StepCosts``: how long a step with so many rows takes, from the steps that ran."""

from __future__ import annotations

from dataclasses import dataclass

_FINE = 16  # up to here every number of rows has an entry of its own, and beyond only each eighth
_SURE = 3  # samples after which an entry is believed
_FORGOTTEN = 512  # steps after which an entry without a new sample is not
_RENEWED = 16  # steps between two estimates
_SLOPE = 0.2  # what a further row is believed to cost before that was measured, as a share of the rows' mean
_FAST, _SLOW = 0.2, 0.1  # weights of a new sample in the machine's pace and in an entry


@dataclass
class Pace:
    """How much longer a step takes now than when it was first measured."""

    value: float = 1.0


class StepCosts:
    """Only ratios of the seconds matter. What slows every step, as a neighbour on the machine does, is one factor, the
    pace. So entries can be compared that were measured at different times, and with those of another model's steps that
    share the ``pace``. What was not measured, or not lately, is believed to be cheap, so that it is measured.
    """

    def __init__(self, max_rows: int, pace: Pace | None = None) -> None:
        self._max_rows = max_rows
        self.pace = pace or Pace()
        self._steps = 0
        self._entries: dict[int, tuple[float, int, int]] = {}  # rows -> seconds at the pace of 1, samples, last step
        self._table: list[float] | None = None

    def add(self, rows: int, seconds: float) -> None:
        """Note a step of ``rows`` that took ``seconds``."""
        if not (0 < rows <= self._max_rows and seconds > 0):
            return
        rows, self._steps = _entry(rows), self._steps + 1
        value, count, last = self._entries.get(rows, (seconds / self.pace.value, 0, 0))
        if last < self._steps - _FORGOTTEN:
            count = 0
        pace = self.pace.value
        pace += _FAST * (min(max(seconds / value, pace / 2), pace * 2) - pace)  # one long step is no new pace
        self.pace.value = pace
        value += max(_SLOW, 1 / (count + 1)) * (min(seconds / pace, 2 * value) - value)
        self._entries[rows] = value, count + 1, self._steps
        if count < _SURE or self._steps % _RENEWED == 0:
            self._table = None

    def knows(self, rows: int) -> bool:
        """Whether steps of ``rows`` were measured often enough, and lately."""
        _, count, last = self._entries.get(_entry(rows), (0.0, 0, 0))
        return count >= _SURE and last >= self._steps - _FORGOTTEN

    @property
    def is_known(self) -> bool:
        """Whether some number of rows is known."""
        return any(map(self.knows, self._entries))

    def table(self) -> list[float]:
        """For each number of rows from 0 to the most the seconds that a step is expected to take, in units of the pace.
        Call it when ``is_known``."""
        if self._table is None:
            self._table = self._estimate()
        return self._table

    def _estimate(self) -> list[float]:
        known = sorted((rows, value) for rows, (value, *_) in self._entries.items() if self.knows(rows))
        least = known[-1][1]
        for index in range(len(known) - 1, -1, -1):  # fewer rows are never dearer: who seems so met a slow moment
            rows, value = known[index]
            least = min(least, value)
            known[index] = rows, least
        (first, low), slope = known[0], known[0][1] / known[0][0] * _SLOPE
        table, last = [low] * (first + 1), first
        for rows, high in known[1:]:
            slope = (high - low) / (rows - last)
            table += [low + slope * step for step in range(1, rows - last + 1)]
            last, low = rows, high
        return table + [low + slope * step for step in range(1, self._max_rows - last + 1)]


def _entry(rows: int) -> int:
    return rows if rows <= _FINE else rows // 8 * 8
