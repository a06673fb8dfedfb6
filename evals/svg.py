"""The look of every plot: matplotlib's drawing as SVG text for a page.

Text and axes take the page's own colour, so a plot reads on light and on dark; text stays text.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Middle tones that stand out on a white and on a black page (after Okabe and Ito, distinct for the colour-blind).
COLOURS = ("#3182bd", "#e6842a", "#2a9d6f", "#c8588f", "#8a7fd1", "#b0912f", "#4fb3bf", "#d05a4e")
MARKERS = "osD^vPX*"
# Stands for the page's text colour until the SVG is written.
_INK = "#010203"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.15,
    "grid.color": _INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def svg(draw: Callable[[Axes], None], salt: str, size: tuple[float, float]) -> str:
    """The ``svg`` element alone. ``salt`` keeps identifiers of several plots on one page apart."""
    with rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        draw(axes)
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor").strip()


def logarithmic(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """1, 2, 5, 10, ... as plain numbers; over many decades only powers of ten."""
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
