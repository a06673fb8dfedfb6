"""The roofline of a machine (Williams, Waterman and Patterson, 2009): the possible rate for each number of operations
per byte read, and a plot of measured rates below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qserve.evals.report import Plot, Series


@dataclass(frozen=True)
class Roof:
    """The peak rates of a machine: ``operations`` per second, None where nothing limits them, and ``bytes`` per
    second."""

    operations: float | None
    bytes: float

    def at(self, intensity: float) -> float:
        """The most operations per second at ``intensity`` operations for each byte."""
        return min(self.operations or float("inf"), intensity * self.bytes)

    def plot(
        self, found: Mapping[str, Sequence[tuple[float, float]]], caption: str, x: str, y: str, unit: float
    ) -> Plot:
        """``found``: for each series (intensity, operations per second). The axis ``y`` counts ``unit`` operations a
        second."""
        intensities = [intensity for points in found.values() for intensity, _ in points]
        points = [min(intensities) / 2]
        while points[-1] < max(intensities) * 2:
            points.append(points[-1] * 1.1)
        lines = [Series("the machine", tuple(points), tuple(self.at(at) / unit for at in points))]
        for name, own in found.items():
            lines.append(Series(name, tuple(at for at, _ in own), tuple(rate / unit for _, rate in own)))
        return Plot("Roofline", caption, x, y, tuple(lines), log_x=True, log_y=True)
