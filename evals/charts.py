"""The plots of a report as SVG text: lines with bands, bars with errors, grids of cells, points with names."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize

from qserve.evals.report import Plot, Series
from qserve.evals.svg import COLOURS, MARKERS, logarithmic, svg

# More points than this are drawn as a curve, fewer as separate points.
_MARKED_POINTS = 40


def chart(plot: Plot, salt: str) -> str:
    """The ``svg`` element. ``salt`` keeps identifiers of several plots on one page apart."""
    if plot.kind == "grid":
        return svg(lambda axes: _grid(axes, plot), salt, (6.2, 1.1 + 0.42 * len(plot.series)))
    if plot.kind == "scatter":
        return svg(lambda axes: _points(axes, plot), salt, (6.2, 3.6))
    return svg(lambda axes: _curves(axes, plot), salt, (6.2, 3.6))


def _curves(axes: Axes, plot: Plot) -> None:
    right = axes.twinx() if any(series.right for series in plot.series) else None
    for index, series in enumerate(plot.series):
        target = right if series.right and right is not None else axes
        if plot.kind == "bar":
            _bars(target, series, index, len(plot.series))
        else:
            _line(target, series, index)
    for x, text in plot.marks:
        axes.axvline(x, color=COLOURS[3], linewidth=1, linestyle="--")
        axes.annotate(
            text, (x, 1.0), xycoords=("data", "axes fraction"), xytext=(5, -3), textcoords="offset points", va="top",
            fontsize=8,
        )  # fmt: skip
    if plot.log_x:
        logarithmic(axes, "x")
    if plot.log_y:
        logarithmic(axes)
    elif all(y >= 0 for series in plot.series if not series.right for y in series.y):
        axes.set_ylim(bottom=0)  # heights can be compared only from zero up
    if plot.ticks:
        step = max(1, len(plot.ticks) // 20)
        axes.set_xticks(range(0, len(plot.ticks), step), plot.ticks[::step], fontsize=8 if len(plot.ticks) > 5 else 9)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if right is not None:
        right.spines["right"].set_visible(True)
        right.set_ylabel(plot.y_right)
        right.set_ylim(bottom=0)
        for more, found in zip((handles, labels), right.get_legend_handles_labels()):
            more += found
    if len(labels) > 1:
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2)


def _line(axes: Axes, series: Series, index: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    marker = MARKERS[index % len(MARKERS)] if len(series.x) <= _MARKED_POINTS else None
    axes.plot(series.x, series.y, label=series.name, color=colour, marker=marker, markersize=4.5, linewidth=1.6)
    if series.low:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)


def _bars(axes: Axes, series: Series, index: int, count: int) -> None:
    width = 0.76 / count
    places = [x + (index - (count - 1) / 2) * width for x in series.x]
    axes.bar(places, series.y, width * 0.92, label=series.name, color=COLOURS[index % len(COLOURS)])
    if series.low:
        below = [max(0.0, y - low) for y, low in zip(series.y, series.low)]
        above = [max(0.0, high - y) for y, high in zip(series.y, series.high)]
        ink = axes.xaxis.label.get_color()
        axes.errorbar(places, series.y, [below, above], fmt="none", ecolor=ink, elinewidth=1, capsize=2.5)


def _grid(axes: Axes, plot: Plot) -> None:
    cells = [list(series.y) for series in plot.series]
    colours = LinearSegmentedColormap.from_list("cells", ["#c8588f", "#e8c37a", "#2a9d6f"])
    known = [value for values in cells for value in values if math.isfinite(value)]
    # From zero up, so that small differences look small and the grids of one page are alike.
    limits = Normalize(min([0.0, *known]), max([0.0, *known]) or 1.0)
    axes.pcolormesh(cells, cmap=colours, norm=limits, edgecolor="#80808040", linewidth=0.5)
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if math.isfinite(value):
                place = (column + 0.5, row + 0.5)
                axes.text(*place, f"{value:.2f}", ha="center", va="center", fontsize=8, color="#101418")
    axes.set_yticks([row + 0.5 for row in range(len(cells))], [series.name for series in plot.series])
    axes.set_xticks([column + 0.5 for column in range(len(plot.ticks))], plot.ticks)
    axes.set_xlabel(plot.x)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _points(axes: Axes, plot: Plot) -> None:
    line, *points = plot.series
    axes.plot(line.x, line.y, color=COLOURS[0], linewidth=1.2, linestyle="--", label=line.name)
    for index, point in enumerate(points):
        errors = [[y - low for y, low in zip(point.y, point.low)], [high - y for y, high in zip(point.y, point.high)]]
        axes.errorbar(
            point.x, point.y, errors if point.low else None, fmt=MARKERS[0], markersize=5, elinewidth=1, capsize=2.5,
            color=COLOURS[1],
        )  # fmt: skip
        # Neighbours often lie close together, so their names go to opposite sides.
        where, side = ((-7.0, -11.0), "right") if index % 2 else ((7.0, 5.0), "left")
        axes.annotate(
            point.name, (point.x[0], point.y[0]), xytext=where, textcoords="offset points", ha=side, fontsize=8
        )
    axes.margins(x=0.25)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right")
