"""Plots of a quantization as SVG text for a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from qserve.evals.svg import COLOURS, MARKERS, logarithmic, svg
from qserve.quantize.layer import LayerReport
from qserve.quantize.mixed.allocate import Tried

_LINEAR = re.compile(r"^(?:.*?\.)?(\d+)\.(.+)$")


def error_per_layer(layers: Sequence[LayerReport]) -> str:
    """The relative output error of each kind of linear along the blocks; experts are averaged."""
    kinds = _by_kind(layers, lambda layer: layer.error)

    def draw(axes: Axes) -> None:
        for index, (kind, values) in enumerate(kinds.items()):
            axes.plot(
                list(values), list(values.values()), label=kind, linewidth=1.2, markersize=4,
                color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)],
            )  # fmt: skip
        if all(value > 0 for values in kinds.values() for value in values.values()):
            logarithmic(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("block")
        axes.set_ylabel("squared error of the output, relative")
        axes.grid(True, axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return svg(draw, "error", (9.0, 3.8))


def bits_per_layer(layers: Sequence[LayerReport], symmetric_zeros: bool) -> str:
    """Stored bits per weight, scales included: blocks from left to right, kinds of linears from top to bottom.
    ``symmetric_zeros`` as in ``Format``."""
    kinds = _by_kind(layers, lambda layer: stored_bits(layer, symmetric_zeros))
    blocks = sorted({block for values in kinds.values() for block in values})
    cells = [[values.get(block, math.nan) for block in blocks] for values in kinds.values()]

    def draw(axes: Axes) -> None:
        colours = LinearSegmentedColormap.from_list("bits", ["#e8a35c", "#8fb9a8", "#2f6f9f"])
        axes.pcolormesh(cells, cmap=colours, norm=Normalize(2, 8.5), edgecolor="#80808040", linewidth=0.5)
        if len(blocks) <= 40:
            for row, values in enumerate(cells):
                for column, value in enumerate(values):
                    if math.isfinite(value):
                        axes.text(
                            column + 0.5, row + 0.5, f"{value:.1f}", ha="center", va="center", fontsize=6.5,
                            color="#ffffff" if value > 6 else "#101418",
                        )  # fmt: skip
        axes.set_yticks([row + 0.5 for row in range(len(kinds))], list(kinds))
        step = max(1, len(blocks) // 16)
        shown = range(0, len(blocks), step)
        axes.set_xticks([column + 0.5 for column in shown], [str(blocks[column]) for column in shown])
        axes.set_xlabel("block")
        axes.invert_yaxis()
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)

    return svg(draw, "bits", (9.0, 0.9 + 0.32 * len(kinds)))


def divergence_against_size(tried: Sequence[Tried]) -> str:
    """Mean KL divergence over stored bits per weight: the predicted curve, and predicted and measured points. A
    single divergence is shown beside the model itself, at 0, on a linear scale; several are on a logarithmic one."""
    alone = sum(each.kl > 0 for each in tried) < 2
    curve = [each for each in tried if not each.label and each.kl > 0]
    points = [each for each in tried if each.label and (alone or each.kl > 0)]

    def draw(axes: Axes) -> None:
        if curve:
            axes.plot(
                [each.bits_per_weight for each in curve], [each.kl for each in curve], color=COLOURS[0],
                linewidth=1.4, label="predicted, best mix for each size",
            )  # fmt: skip
        for measured, name, colour in ((False, "predicted", COLOURS[0]), (True, "measured", COLOURS[1])):
            own = [each for each in points if each.measured == measured]
            if own:
                axes.scatter(
                    [each.bits_per_weight for each in own], [each.kl for each in own], s=36, zorder=3, label=name,
                    edgecolors=colour, facecolors=colour if measured else "none",
                )  # fmt: skip
        # Neighbours in size often lie close together, so their names go to opposite sides.
        for index, each in enumerate(sorted(points, key=lambda point: (point.bits_per_weight, point.kl))):
            where, side = ((-7.0, -11.0), "right") if index % 2 else ((7.0, 5.0), "left")
            axes.annotate(
                each.label, (each.bits_per_weight, each.kl), xytext=where, textcoords="offset points", ha=side,
                fontsize=8,
            )  # fmt: skip
        axes.margins(x=0.25)
        if alone:
            axes.scatter([16], [0], s=36, zorder=3, color=COLOURS[2], marker=MARKERS[1], label="the model itself")
            axes.set_ylim(bottom=0)
        else:
            logarithmic(axes)
        axes.set_xlabel("stored bits per quantized weight")
        axes.set_ylabel("mean KL divergence (nats)")
        axes.grid(True)
        axes.legend(loc="upper right")

    return svg(draw, "size", (9.0, 4.2))


def stored_bits(layer: LayerReport, symmetric_zeros: bool) -> float:
    """Bits per weight with the scales of its groups; scales of whole channels or tensors are too few to count."""
    scheme = layer.scheme
    if -1 in (scheme.group_size, scheme.rows):
        return float(scheme.bits)
    rows, width = scheme.rows, scheme.group_size
    return scheme.storage_bits(rows, width, symmetric_zeros=symmetric_zeros) / (rows * width)


def _by_kind(layers: Sequence[LayerReport], value: Callable[[LayerReport], float]) -> Mapping[str, dict[int, float]]:
    """Kind of linear -> block -> mean value. Linears outside the blocks are left out."""
    found: dict[str, dict[int, list[float]]] = {}
    for layer in layers:
        if match := _LINEAR.match(layer.module):
            kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", match.group(2))
            found.setdefault(kind, {}).setdefault(int(match.group(1)), []).append(value(layer))
    return {
        kind: {block: fmean(values) for block, values in sorted(blocks.items())} for kind, blocks in found.items()
    }
