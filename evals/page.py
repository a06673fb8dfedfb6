"""One self-contained HTML page of a report: nothing is fetched and nothing runs.

Names and texts come from strangers' models, so they are escaped wherever they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from qserve.evals.report import Metric, Report, Section

_CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6878; --page: #fdfdfc; --line: #d9dde3; --head: #f2f4f6;
  --good: #1e7f58; --bad: #b3362c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe4ea; --soft: #98a3b1; --page: #14181d; --line: #323a44; --head: #1d232a; --good: #5cc79b;
    --bad: #f08a80; }
}
body { color: var(--ink); background: var(--page); font: 15px/1.5 system-ui, sans-serif; max-width: 68rem;
  margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p.soft, figcaption { color: var(--soft); font-size: .88rem; margin: .2rem 0; }
pre { background: var(--head); padding: .6rem .8rem; border-radius: 4px; overflow-x: auto; font-size: .85rem;
  white-space: pre-wrap; }
figure { margin: 0; } svg { max-width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; } th { color: var(--soft); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }
dl div { background: var(--head); border-radius: 6px; padding: .7rem .9rem; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-variant-numeric: tabular-nums; }
dd.value { font-size: 1.45rem; font-weight: 600; line-height: 1.3; } dd.value small { font-size: .8rem;
  font-weight: 400; color: var(--soft); } dd.range { color: var(--soft); font-size: .78rem; }
div.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(29rem, 100%), 1fr)); gap: 0 2rem; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
"""
# The verdicts of gates and comparisons.
_TONES = {"passed": "good", "better": "good", "FAILED": "bad", "worse": "bad"}
# As many figures as a reader takes in at a glance.
_TILES = 6


def page(report: Report) -> str:
    """The page of any report: its first metrics, gates, plots, tables."""
    from qserve.evals.charts import chart

    drawn = [figure(plot.title, plot.caption, chart(plot, f"plot{n}")) for n, plot in enumerate(report.plots)]
    plots = f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""
    first, *rest = [*map(table, report.tables()), ""]
    return document(report, [_tiles(report.metrics), _verdict(report), first, plots, *rest])


def document(report: Report, parts: Sequence[str]) -> str:
    """``parts``, HTML, below the title, the environment and the command of ``report``."""
    # Should an escape ever be forgotten, this policy still keeps the page from running or fetching anything.
    return "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(report.title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>",
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="soft">{escape(", ".join(f"{key} {value}" for key, value in report.environment.items()))}</p>',
        f"<pre>{escape(report.command)}</pre>",
        *filter(None, parts),
        "</body>\n</html>\n",
    ])  # fmt: skip


def figure(title: str, caption: str, svg: str) -> str:
    return f"<figure><h2>{escape(title)}</h2><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def table(section: Section) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{_tone(cell)}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(section.header, 'th')}</thead>" if any(section.header) else ""
    body = "\n".join(row(cells, "td") for cells in section.rows)
    title = f"<h2>{escape(section.title)}</h2>"
    return f'<section>{title}<div class="wide"><table>{head}<tbody>\n{body}\n</tbody></table></div></section>'


def _tone(cell: str) -> str:
    tone = _TONES.get(cell.split(" ", 1)[0])
    return f' class="{tone}"' if tone else ""


def _tiles(metrics: Sequence[Metric]) -> str:
    tiles = []
    for metric in metrics[:_TILES]:
        unit = f" <small>{escape(metric.unit)}</small>" if metric.unit else ""
        interval = ""
        if metric.low is not None and metric.high is not None:
            interval = f'<dd class="range">{metric.low:.4g} to {metric.high:.4g}</dd>'
        name = escape(metric.name.replace("_", " "))
        tiles.append(f'<div><dt>{name}</dt><dd class="value">{metric.value:.4g}{unit}</dd>{interval}</div>')
    return f"<dl>{''.join(tiles)}</dl>" if tiles else ""


def _verdict(report: Report) -> str:
    if not report.gates:
        return ""
    failed = [gate.metric for gate in report.gates if not gate.passed]
    if failed:
        return f'<p class="bad">Failed: {escape(", ".join(failed))}</p>'
    count = len(report.gates)
    return f'<p class="good">{"All" if count > 1 else ""} {count} gate{"s" if count > 1 else ""} passed.</p>'
