"""The dashboard and the alerts ask for metrics that a real server exports, with labels that it gives them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.source import open_model
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.serve import ServerHandle

DEPLOY = Path(__file__).parents[2] / "deploy"
CARD = QualityCard(
    base_name="base", base_sha256="0", data_name="text", data_sha256="0", tokens=100, window=10,
    perplexity_base=10.0, perplexity=10.5, kl_mean=0.02, kl_median=0.01, kl_p90=0.05, top1_agreement=0.93,
    kernel_path="native", created="2026-01-01",
)  # fmt: skip
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"}


@pytest.fixture(scope="module")
def exported(tiny_model: Path) -> dict[str, set[str]]:
    """Every sample of a server with a quality card that has answered one request: name -> labels."""
    source = open_model(str(tiny_model))
    source.card = CARD
    with ServerHandle(Engine(source, EngineConfig(max_model_len=64, kv_cache_memory=8 << 20, threads=1))) as server:
        body = {"prompt": "the", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{server.url}/completions", json=body, timeout=60).status_code == 200
        text = httpx.get(server.url.replace("/v1", "/metrics")).text
    found: dict[str, set[str]] = {"up": {"instance", "job"}}  # of Prometheus itself
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels, ("instance", "job"))
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana/qserve.json").read_text(encoding="utf-8"))["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """The place of each expression, and its PromQL."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def asked(expression: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that an expression names."""
    matchers = re.findall(r"\{([^}]*)\}", expression)
    grouped = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression)
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", " ".join(matchers)))
    labels |= {name.strip() for names in grouped for name in names.split(",")}
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", expression)
    names = set(re.findall(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", rest))
    return names - WORDS, labels


def test_the_reading_of_promql() -> None:
    expression = 'sum by (le, a) (rate(x:y_bucket{b=~"c{1}", d!="e"}[5m])) / 2.5e3 > 0.3 and on (f) up offset 5m'
    assert asked(expression.replace("{1}", ""))[0] - {"m", "e3"} == {"x:y_bucket", "up"}
    assert asked(expression.replace("{1}", ""))[1] == {"le", "a", "b", "d", "f"}


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda text: text[:40])
def test_every_metric_is_exported(exported: dict[str, set[str]], where: str, expression: str) -> None:
    names, labels = asked(expression)
    assert names, f"{where} asks for no metric"
    assert names <= exported.keys(), f"{where}: {names - exported.keys()}"
    known = set().union(*(exported[name] for name in names))
    assert labels <= known, f"{where}: {labels - known}"


def test_the_limits_of_the_alerts_are_limits_of_buckets() -> None:
    from qserve.runtime.server.telemetry.metrics import _SECONDS

    asked_for = {float(le) for _, expression in expressions() for le in re.findall(r'le="([\d.]+)"', expression)}
    assert asked_for and asked_for <= set(map(float, _SECONDS))


def test_the_dashboard_shows_what_matters_and_its_panels_do_not_overlap() -> None:
    shown = " ".join(expression for where, expression in expressions() if where.startswith("panel"))
    for name in ("time_to_first_token", "inter_token_latency", "generation_tokens", "num_requests_waiting",
                 "kv_cache_usage", "kv_cache_fragmentation", "requests_rejected", "quality_kl_mean"):  # fmt: skip
        assert f"qserve:{name}" in shown
    assert "0.5" in shown and "0.95" in shown
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_the_alerts_know_the_job_by_its_name() -> None:
    content = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (job,) = content["scrape_configs"]
    named = {name for rule in rules() for name in re.findall(r'job="([^"]*)"', rule["expr"])}
    assert named == {job["job_name"]} and content["rule_files"] == ["alerts.yaml"]


def test_every_alert_says_how_urgent_it_is_and_what_happened() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    assert any("kv_cache_fragmentation_perc > 0.3" in rule["expr"] for rule in rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed; it comes with Prometheus")
def test_promtool_accepts_the_configuration_and_alerts_fire_when_they_should(tmp_path: Path) -> None:
    for path in (DEPLOY / "prometheus/alerts.yaml", Path(__file__).with_name("alerts_test.yaml")):
        shutil.copy(path, tmp_path)
    # The file of the key must be there for the check.
    (tmp_path / "key").touch()
    text = (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/qserve-key", "key"), encoding="utf-8")
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
