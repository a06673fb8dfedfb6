"""The report of a quantization: three files that say the same, and a page that is safe to open."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.loaders import LoaderVerdict
from qserve.checkpoint.spec import KVScheme, QuantSpec, WeightScheme
from qserve.evals.quantize_report import write_quantize_report
from qserve.evals.worst import WorstToken
from qserve.quantize.forecast import Forecast
from qserve.quantize.layer import LayerReport
from qserve.quantize.mixed.allocate import Tried
from qserve.quantize.report import QuantizeReport

HOSTILE = "<script>alert('$x$')</script>"
LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
CARD = QualityCard(
    base_name="base", base_sha256="0" * 64, data_name="text", data_sha256="1" * 64, tokens=1234, window=10,
    perplexity_base=10.0, perplexity=10.5, kl_mean=0.0512345, kl_median=0.04, kl_p90=0.1, top1_agreement=0.9,
    kernel_path="reference", created="2026-01-01",
)  # fmt: skip
WORST = (
    WorstToken(f"before\n{HOSTILE} | \u202e", HOSTILE, 7.123456, " the", 0.9, f"`{HOSTILE}`\n", 0.25),
    WorstToken("a", "b", 1.0, "c", 0.5, "d", 0.5),
)


def a_report(**changes: object) -> QuantizeReport:
    layers = tuple(
        LayerReport(f"model.layers.{block}.{linear}", WeightScheme(8 if block == 1 else 4, 64), 0.0123456 / (block + 1))
        for block in range(3)
        for linear in LINEARS
    )
    content: dict[str, object] = dict(
        spec=QuantSpec(
            "gptq", WeightScheme(4, 64), kv_cache=KVScheme("int8"),
            overrides={"model.layers.1.mlp.down_proj": WeightScheme(8, 64)},
        ),
        format="gptq",
        layers=(*layers, LayerReport("lm_head", WeightScheme(8, -1), 0.001, 0.01, 3, f"rounded {HOSTILE}")),
        notices=(f"notice {HOSTILE}",),
        verdicts=(LoaderVerdict("qserve", True), LoaderVerdict("vllm", False, "3 | 4 bits")),
        forecast=Forecast(2**30, 12.5, 2**27, 128),
        bits_per_weight=5.75,
        checkpoint_bytes=2**27 + 2**20,
        seconds=13.25,
        peak_bytes=2**29,
        calibration_sha256="ab" * 32,
        card=CARD,
        tried=(
            Tried("", 3.3, 0.4), Tried("", 4.3, 0.1), Tried("", 8.3, 0.001),
            Tried("all 4 bit g64 symmetric", 4.3125, 0.12), Tried(f"attempt {HOSTILE}", 4.25, 0.11, True),
        ),
    )  # fmt: skip
    return QuantizeReport(**{**content, **changes})  # type: ignore[arg-type]


class Page(HTMLParser):
    """Elements must nest; collects what there is."""

    VOID = ("meta", "br", "path", "use", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    directory = tmp_path_factory.mktemp("reports") / "new"
    command = f"qserve quantize {HOSTILE}"
    return write_quantize_report(directory, a_report(), name=f"w4 {HOSTILE}", command=command, worst=WORST)


def test_json_holds_the_numbers_of_the_report(written: tuple[Path, ...]) -> None:
    report, content = a_report(), json.loads(written[0].read_text(encoding="utf-8"))
    data = content["data"]
    assert content["kind"] == "quantization" and content["command"] == f"qserve quantize {HOSTILE}"
    assert [LayerReport.from_json(layer) for layer in data["layers"]] == list(report.layers)
    assert QualityCard.from_json(data["card"]) == CARD
    assert tuple(Tried(**each) for each in data["tried"]) == report.tried
    assert data["bits_per_weight"] == 5.75
    assert tuple(WorstToken(**each) for each in data["worst"]) == WORST
    assert Forecast(**data["forecast"]) == report.forecast and data["checkpoint_bytes"] == report.checkpoint_bytes
    assert {each["name"]: each["value"] for each in content["metrics"]}["checkpoint_size"] == report.checkpoint_bytes
    assert (data["seconds"], data["peak_bytes"], data["format"]) == (13.25, 2**29, "gptq")
    assert data["spec"]["weights"] == {
        "bits": 4, "group_size": 64, "symmetric": True, "dtype": "int", "rows": 1, "scale_bits": 0
    }  # fmt: skip
    assert data["spec"]["overrides"]["model.layers.1.mlp.down_proj"]["bits"] == 8
    assert data["verdicts"][1] == {"loader": "vllm", "accepts": False, "reason": "3 | 4 bits"}


def test_the_page_is_whole_and_shows_the_plots(written: tuple[Path, ...]) -> None:
    page = Page(written[2].read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 3
    for expected in (
        "Divergence against size", "Error per layer", "Bits per layer", "Tokens with the largest divergence",
        "mean KL divergence (nats)", "squared error of the output, relative", *LINEARS, "0.0512", "7.123",
        "3 | 4 bits", "4.3125"[:5], "512 MiB (forecast 1,024 MiB)",
        "129.0 MiB (forecast 128.0 MiB)",
    ):  # fmt: skip
        assert expected in page.text, expected


def test_bits_per_layer_are_those_that_the_format_stores(tmp_path: Path) -> None:
    for format, shown in (("gptq", "4.6"), ("compressed-tensors", "4.5")):
        layers = (LayerReport("model.layers.0.mlp.up_proj", WeightScheme(4, 32), 0.1),)
        paths = write_quantize_report(tmp_path, a_report(layers=layers, format=format, tried=()), name="m", command="c")
        cells = Page(paths[2].read_text(encoding="utf-8")).text.split("Bits per layer")[-1]
        assert [bits for bits in ("4.5", "4.6") if re.search(rf"\b{re.escape(bits)}\b", cells)] == [shown]


def test_the_page_holds_no_markup_of_strangers_and_loads_nothing(written: tuple[Path, ...]) -> None:
    text = written[2].read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "image", "foreignobject"} & set(page.tags)
    assert HOSTILE in page.text and "<script" not in text
    assert "\u202e" not in text and "\\u202e" in text
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert all((value or "").startswith("#") for name, value in page.attributes if name.endswith("href"))
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
    }  # fmt: skip
    assert not re.search(r"url\((?!#)", text) and "@import" not in text


def test_the_plots_take_the_colour_of_the_page(written: tuple[Path, ...]) -> None:
    text = written[2].read_text(encoding="utf-8")
    plots = text[text.index("<svg") :]
    assert "currentColor" in plots and "#010203" not in plots
    identifiers = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers)) == 3


def test_markdown_is_made_of_whole_tables(written: tuple[Path, ...]) -> None:
    text = written[1].read_text(encoding="utf-8")
    assert text.startswith("# Quantization of w4 \\<script\\>")
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 7
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    assert "| vllm | no | 3 \\| 4 bits |" in text
    assert "<script" not in re.sub(r"^    .*$", "", text, flags=re.MULTILINE).replace("\\<", "")
    assert "| model.layers.0.mlp.down_proj | 4 bit g64 symmetric | 0.0123 |" in text
    assert "␣the (90.0%)" in text


def test_the_same_report_gives_the_same_bytes(written: tuple[Path, ...], tmp_path: Path) -> None:
    again = write_quantize_report(
        tmp_path, a_report(), name=f"w4 {HOSTILE}", command=f"qserve quantize {HOSTILE}", worst=WORST
    )
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_without_measurements_or_exact_layers(tmp_path: Path) -> None:
    """No card, nothing tried, an error of zero that no logarithm shows, linears of experts."""
    layers = tuple(
        LayerReport(f"model.layers.{block}.experts.{expert}.w1", WeightScheme(8, -1, dtype="fp8", rows=rows), 0.0)
        for block in range(2)
        for expert, rows in enumerate((1, -1, 1))
    )
    report = a_report(layers=layers, card=None, tried=(), notices=(), calibration_sha256=None)
    page = Page(write_quantize_report(tmp_path, report, name="m", command="c")[2].read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 2 and "experts.*.w1" in page.text
    assert "largest divergence" not in page.text and "Sizes tried" not in page.text


def sizes(directory: Path, name: str, **changes: object) -> list[str]:
    """The rows of "Sizes tried" in the report of a job, of one precision unless said otherwise, and what its plot says;
    the two agree."""
    report = a_report(**{"tried": (), **changes})
    json_path, _, page_path = write_quantize_report(directory, report, name=name, command="c")
    found = {each["title"]: each["rows"] for each in json.loads(json_path.read_text())["sections"]}["Sizes tried"]
    page = Page(page_path.read_text(encoding="utf-8"))
    plot = page.text.split("Divergence against size")[1].split("Error per layer")[0]
    assert page.tags.count("svg") == 3 and all(row[0] in plot for row in found)
    assert ("the model itself" in plot) == (len([row for row in found if float(row[2])]) < 2)
    return [" ".join(row) for row in found]


def measured(kl: float, **changes: object) -> dict[str, object]:
    return {"card": replace(CARD, kl_mean=kl, **changes)}  # type: ignore[arg-type]


def test_jobs_of_one_directory_are_compared(tmp_path: Path) -> None:
    assert sizes(tmp_path, "w4", bits_per_weight=4.5, **measured(0.05)) == ["w4 4.500 0.0500 measured"]
    assert sizes(tmp_path, "w3", bits_per_weight=3.5, **measured(0.3)) == [
        "w3 3.500 0.3000 measured", "w4 4.500 0.0500 measured"
    ]  # fmt: skip
    assert sizes(tmp_path, "w4", bits_per_weight=4.25, **measured(0.04)) == [
        "w4 4.250 0.0400 measured", "w3 3.500 0.3000 measured"
    ]  # fmt: skip
    tried = (Tried("", 3.3, 0.4), Tried("", 8.3, 0.001), Tried("measured", 5.0, 0.03, True))
    assert sizes(tmp_path, "mixed", bits_per_weight=5.0, tried=tried, **measured(0.03)) == [
        "measured 5.000 0.0300 measured", "w4 4.250 0.0400 measured", "w3 3.500 0.3000 measured"
    ]  # fmt: skip
    assert sizes(tmp_path, "w8", bits_per_weight=8.25, **measured(0.003))[1] == "mixed 5.000 0.0300 measured"


@pytest.mark.parametrize(
    "other", [{"base_sha256": "2" * 64}, {"data_sha256": "2" * 64}, {"tokens": 1235}, {"window": 11}], ids=str
)
def test_what_was_measured_otherwise_is_not_compared(tmp_path: Path, other: dict[str, object]) -> None:
    sizes(tmp_path, "w4", **measured(0.05))
    assert sizes(tmp_path, "w3", **measured(0.3, **other)) == ["w3 5.750 0.3000 measured"]


@pytest.mark.parametrize("damage", ["no report", '"measured": 3', '"kl": null', '"kl": Infinity'])
def test_a_damaged_report_is_replaced(tmp_path: Path, damage: str) -> None:
    sizes(tmp_path, "w4", **measured(0.05))
    path = tmp_path / "quantization.json"
    key = damage.partition(":")[0]
    text = path.read_text()
    path.write_text("{}" if damage == "no report" else re.sub(rf'{key}: (\[[^]]*\]|0\.05\b)', damage, text))
    assert path.read_text() != text
    assert sizes(tmp_path, "w3", **measured(0.3)) == ["w3 5.750 0.3000 measured"]


def test_a_checkpoint_that_lost_nothing_is_shown(tmp_path: Path) -> None:
    assert sizes(tmp_path, "w8", **measured(0.0)) == ["w8 5.750 0.0000 measured"]
    assert len(sizes(tmp_path, "again", **measured(0.0))) == 2


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QServeError, match="cannot write"):
        write_quantize_report(tmp_path / "file" / "reports", a_report(), name="m", command="c")
