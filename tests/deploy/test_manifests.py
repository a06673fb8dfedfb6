"""What ``deploy/`` starts: it parses, its commands exist, it leaves time to drain, and no secret or model is in it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import typer
import yaml

from qserve.cli import app
from qserve.runtime.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
COMPOSE = DEPLOY / "compose/compose.yaml"
GPU = DEPLOY / "kubernetes/gpu/kustomization.yaml"
UNIT = DEPLOY / "systemd/qserve.service"
SITE = DEPLOY / "nginx/qserve.conf"


def documents() -> list[dict[str, Any]]:
    return [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def kind(name: str) -> dict[str, Any]:
    (found,) = [document for document in documents() if document["kind"] == name]
    return found


def container() -> dict[str, Any]:
    (found,) = kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def options(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def containerfile() -> list[str]:
    """Its instructions, each on one line."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def unit(name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", UNIT.read_text(encoding="utf-8"))


def known_options(command: str) -> set[str]:
    params = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for parameter in params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_every_command_is_one_that_this_version_has() -> None:
    known = known_options("run")
    (start,) = unit("ExecStart")
    (default,) = [line for line in containerfile() if line.startswith("CMD")]
    for words in (container()["args"], shlex.split(start), re.findall(r'"([^"]*)"', default)):
        assert "run" in words
        assert options(words) <= known, options(words) - known


def test_on_a_gpu_a_pod_asks_for_one_and_its_cache_for_the_rest() -> None:
    base = next(document for document in documents() if document["kind"] == "Deployment")
    kustomization = yaml.safe_load(GPU.read_text(encoding="utf-8"))
    assert all((GPU.parent / name / "kustomization.yaml").exists() for name in kustomization["resources"])
    (patch,) = kustomization["patches"]
    assert patch["target"]["name"] == base["metadata"]["name"]
    changed = jsonpatch.apply_patch(base, yaml.safe_load(patch["patch"]))
    (before,), (after,) = (each["spec"]["template"]["spec"]["containers"] for each in (base, changed))
    assert after["resources"]["limits"] == {**before["resources"]["limits"], "nvidia.com/gpu": "1"}
    assert [word for word in before["args"] if word not in after["args"]] == ["--kv-cache-memory=4GiB"]
    assert changed["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    assert changed["spec"]["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_compose_runs_two_servers_behind_a_router_that_asks_for_keys() -> None:
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    one, two, route = (services[name] for name in ("one", "two", "route"))
    for service in (one, two, route):
        name, *words = service["command"]
        assert options(words) <= known_options(name)
        assert service["read_only"] and int(service["stop_grace_period"].rstrip("s")) > ServerConfig().drain_timeout
    assert one["command"] == two["command"] and one["cpuset"] != two["cpuset"]
    assert one["networks"] == two["networks"] == ["inside"] and "ports" not in one, "they ask for no key"
    assert {"http://one:8000", "http://two:8000"} <= set(route["command"])
    assert "--api-keys=/etc/qserve/keys.toml" in route["command"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            made = ("./keys.toml", "./metrics-key")  # by whoever follows the README
            assert source in made or not source.startswith(".") or (COMPOSE.parent / source).is_file(), source
    jobs = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert [job["static_configs"][0]["targets"] for job in jobs] == [["one:8000", "two:8000"], ["route:8000"]]


def test_compose_is_valid_by_its_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_autoscalers_go_by_the_queue_and_own_the_number_of_pods() -> None:
    hpa, keda = kind("HorizontalPodAutoscaler")["spec"], kind("ScaledObject")["spec"]
    name = kind("Deployment")["metadata"]["name"]
    assert hpa["scaleTargetRef"]["name"] == keda["scaleTargetRef"]["name"] == name
    (rule,) = yaml.safe_load((DEPLOY / "prometheus/adapter.yaml").read_text(encoding="utf-8"))["rules"]
    metric = hpa["metrics"][0]["pods"]["metric"]["name"]
    assert rule["name"]["as"] == metric == "qserve_num_requests_waiting"
    assert rule["seriesQuery"].startswith("qserve:num_requests_waiting{")
    assert "qserve:num_requests_waiting" in keda["triggers"][0]["metadata"]["query"]
    for path in ("hpa", "keda"):
        kustomization = yaml.safe_load((DEPLOY / f"kubernetes/{path}/kustomization.yaml").read_text(encoding="utf-8"))
        (patch,) = kustomization["patches"]
        assert yaml.safe_load(patch["patch"]) == [{"op": "remove", "path": "/spec/replicas"}]


def test_the_ingress_shows_the_api_and_lets_streams_through() -> None:
    ingress, service = kind("Ingress"), kind("Service")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == "/v1" and path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]
    notes = ingress["metadata"]["annotations"]
    assert notes["nginx.org/proxy-buffering"] == "False"
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    sizes = {notes["nginx.org/client-max-body-size"], notes["nginx.ingress.kubernetes.io/proxy-body-size"]}
    assert sizes == {f"{ServerConfig().max_body_bytes >> 20}m"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("name", ["base", "gpu", "hpa", "keda"])
def test_kubectl_puts_the_parts_together(name: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / "kubernetes" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= found.keys()
    scaled = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}.get(name)
    assert ("replicas" in found["Deployment"]["spec"]) == (scaled is None)
    assert scaled is None or scaled in found


def test_what_triton_compiles_can_be_written_and_run() -> None:
    """The root is read-only everywhere: the image and the pod have /tmp, the unit a home of its own."""
    (environment,) = [line for line in containerfile() if line.startswith("ENV")]
    assert "TRITON_CACHE_DIR=/tmp/" in environment and "XDG_CACHE_HOME=/tmp/" in environment
    final = containerfile()[[index for index, line in enumerate(containerfile()) if line.startswith("FROM")][-1] :]
    assert any(line.startswith("ARG COMPILER=") and "gcc libc6-dev" in line for line in final)
    assert "--read-only --tmpfs /tmp:exec" in (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert {"name": "scratch", "mountPath": "/tmp"} in container()["volumeMounts"]
    assert any("HOME=%C/qserve" in line for line in unit("Environment")) and unit("CacheDirectory") == ["qserve"]


def test_the_grace_is_longer_than_the_drain() -> None:
    drain = ServerConfig().drain_timeout
    pod = kind("Deployment")["spec"]["template"]["spec"]
    before = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + before
    assert int(unit("TimeoutStopSec")[0]) > drain


def test_the_unit_runs_as_nobody_special() -> None:
    assert unit("User") == ["qserve"]
    assert unit("NoNewPrivileges") == ["yes"] and unit("ProtectSystem") == ["strict"]
    assert unit("CapabilityBoundingSet") == [""]


def test_the_pod_is_probed_limited_and_unprivileged() -> None:
    spec = container()
    probes = {name: spec[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert probes == {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert spec["resources"]["limits"]["memory"] and spec["resources"]["requests"]["cpu"]
    assert not spec["securityContext"]["allowPrivilegeEscalation"]
    assert kind("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    assert all(volume["readOnly"] for volume in spec["volumeMounts"] if volume["name"] != "scratch")


def test_the_parts_of_the_manifests_name_each_other() -> None:
    labels = kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert kind("Deployment")["spec"]["selector"]["matchLabels"] == labels == kind("Service")["spec"]["selector"]
    for name in ("PodDisruptionBudget", "ServiceMonitor"):
        assert kind(name)["spec"]["selector"]["matchLabels"] == labels
    (endpoint,), (port,) = kind("ServiceMonitor")["spec"]["endpoints"], kind("Service")["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    credentials = endpoint["authorization"]["credentials"]
    assert (
        credentials["key"] in kind("Secret")["stringData"] and credentials["name"] == kind("Secret")["metadata"]["name"]
    )
    assert port["targetPort"] in [item["name"] for item in container()["ports"]]


def test_the_image_is_pinned_unprivileged_and_holds_no_model() -> None:
    lines = containerfile()
    bases = [line.split()[1] for line in lines if line.startswith("FROM")]
    assert len(bases) == 2 and all(re.search(r":\d+\.\d+\.\d+-\w+", base) for base in bases)
    last = lines[max(index for index, line in enumerate(lines) if line.startswith("FROM")) :]
    (user,) = [line.split()[1] for line in last if line.startswith("USER")]
    assert user.split(":")[0] not in ("root", "0")
    assert any(line.startswith("HEALTHCHECK") for line in last)
    sources = {
        word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]
    }
    assert sources == {
        "pyproject.toml",
        "README.md",
        *(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists() and path.name != "tests"),
    }
    ignored = (DEPLOY / "Containerfile.containerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in ignored if not line.startswith("#")) == "*"
    assert {"**/*.safetensors", "**/*.gguf", "**/*.pem", "**/quality_card.json"} <= set(ignored)


def test_nothing_under_deploy_is_a_secret() -> None:
    for path in DEPLOY.rglob("*"):
        assert path.suffix not in (".pem", ".key", ".crt", ".env", ".safetensors")
        if path.is_file():
            assert "PRIVATE KEY" not in path.read_text(encoding="utf-8")


def test_the_site_lets_streams_through() -> None:
    text = SITE.read_text(encoding="utf-8")
    for line in ("proxy_buffering off", "proxy_http_version 1.1", "gzip off", "proxy_next_upstream   off"):
        assert line in text
    limit = re.search(r"client_max_body_size\s+(\d+)m", text)
    assert limit is not None and int(limit[1]) << 20 == ServerConfig().max_body_bytes


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that exists in place of the server's: it looks whether there is one."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/qserve/bin/qserve", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert not complaints, complaints


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_with_a_gpu(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8"), (UNIT.parent / "gpu.conf").read_text(encoding="utf-8")
    unit_text, added = (each.replace("/opt/qserve/bin/qserve", "/bin/true") for each in text)
    (tmp_path / UNIT.name).write_text(unit_text, encoding="utf-8")
    (tmp_path / f"{UNIT.name}.d").mkdir()
    (tmp_path / f"{UNIT.name}.d/gpu.conf").write_text(added, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name], capture_output=True, text=True,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if "gpu.conf" in line or UNIT.name in line]
    assert not complaints, complaints
    assert "PrivateDevices=no" in added
