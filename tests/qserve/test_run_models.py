"""``qserve run A B``: what it refuses before anything is loaded, how it divides a machine, and that nothing stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.cli import app
from qserve.kernels import native
from qserve.kernels.threads import usable_cpus
from qserve.runtime.config import EngineConfig
from qserve.runtime.fleet.joint_plan import plan_together
from qserve.runtime.memory import MemoryPlan, divide
from tests.tiny_model import save_tiny_model

OPTIONS = ["--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory", "1MiB"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("small", "large"):
        save_tiny_model(folder / name, context=256)
    return [str(folder / "small"), str(folder / "large")]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--lora", "a=b"], "--lora is for one model"),
        (["--kv-offload-dir", "x"], "--kv-offload-dir is for one model"),
        (["--served-model-name", "x"], "once for each of the 2 models"),
        (["--unload-after", "0"], "1 at least, not 0"),
        (["--tls-cert", "x"], "are given together"),
    ],
)
def test_bad_usage_is_one_line(models: list[str], options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["run", *models, *options])
    assert result.exit_code == 2 and why in result.output


def test_a_file_of_options_may_name_several(models: list[str], tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(json.dumps({"model": models, "unload-after": 0}))
    result = CliRunner().invoke(app, ["run", "--config", str(tmp_path / "options.yaml")])
    assert result.exit_code == 2 and "1 at least, not 0" in result.output


@pytest.mark.parametrize("options", [["--unload-after", "9"], ["--pin", "x"]])
def test_one_model_stays(models: list[str], options: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", models[0], *options])
    assert result.exit_code == 2 and "for several models" in result.output


def test_they_divide_threads_and_cpus(models: list[str]) -> None:
    shares = plan_together(models * 2, ["a", "b", "c", "d"], EngineConfig(threads=6, kv_cache_memory=1 << 20))
    assert [share.threads for share in shares] == [2, 2, 1, 1]
    assert [share.name for share in shares] == ["a", "b", "c", "d"] and shares[1].model == models[1]
    cpus = tuple(usable_cpus() or ())
    if len(cpus) > 1 and native.missing() is None:
        shares = plan_together(models, [], EngineConfig(cpu_list=cpus, kv_cache_memory=1 << 20))
        assert sum((share.cpu_list or () for share in shares), ()) == cpus and shares[1].cpu_list
        with pytest.raises(UsageError, match="names 1 CPUs for 2 models"):
            plan_together(models, [], EngineConfig(cpu_list=cpus[:1], kv_cache_memory=1 << 20))


def test_what_does_not_fit_together_is_refused_with_the_arithmetic(models: list[str]) -> None:
    with pytest.raises(CapacityError, match=r"do not fit together.*for small.*for large.*2 KV caches of 9216\.0 GiB"):
        plan_together(models, [], EngineConfig(kv_cache_memory=9 << 40))
    with pytest.raises(CapacityError, match=r"small: a KV cache of .* cannot hold 256 tokens"):
        plan_together(models, [], EngineConfig(kv_cache_memory=1 << 15, max_model_len=256))
    with pytest.raises(UsageError, match="two models are called 'small'"):
        plan_together([models[0]] * 2, [], EngineConfig())


@given(
    st.lists(st.integers(1, 1 << 30), min_size=2, max_size=6), st.integers(1, 1 << 33), st.none() | st.integers(1, 99)
)
def test_caches_and_weights_are_never_more_than_there_is(sizes: list[int], available: int, cache: int | None) -> None:
    plans = {
        f"m{index}": MemoryPlan(size, 7, kv_cache=max(1, (available - size) // 2), available=available, num_blocks=1,
                                max_model_len=1, process=11)
        for index, size in enumerate(sizes)
    }  # fmt: skip
    try:
        caches = divide(plans, cache)
    except CapacityError:
        assert sum(sizes) + (18 + (cache or 1)) * len(sizes) > available
    else:
        assert sum(sizes) + 18 * len(sizes) + sum(caches.values()) <= available
        assert caches.keys() == plans.keys() and (cache is None or set(caches.values()) == {cache})


@contextmanager
def running(models: list[str], *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "qserve", "run", *models, "--port", "0", *OPTIONS, *options]
    environment = {**os.environ, "QSERVE_API_KEY": "secret"}  # for the address, not for the processes behind it
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr)
            address = next(line for line in lines if line.startswith("serving")).split()[-1]
            yield process, address
            process.stderr.close()
        finally:
            process.kill()


def ask(address: str, model: str) -> str:
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(f"{address}/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["model"])


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def num_servers(process: subprocess.Popen[str]) -> int:
    count = 0
    for child in below(process):
        with contextlib.suppress(psutil.Error):  # one that has ended
            count += "--uds" in " ".join(child.cmdline())
    return count


@pytest.mark.slow
def test_two_models_answer_at_one_address_and_a_signal_ends_all(models: list[str]) -> None:
    with running(models, "--log-format", "text") as (process, address):
        assert [ask(address, name) for name in ("small", "large")] == ["small", "large"]
        assert psutil.Process(process.pid).memory_info().rss < 120 << 20, "the parent computes nothing"
        children = below(process)
        assert num_servers(process) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not psutil.wait_procs(children, 5)[1]


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_nobody_behind(models: list[str]) -> None:
    with running(models) as (process, address):
        assert ask(address, "large") == "large"
        children = below(process)
        process.kill()
        assert len(children) >= 2 and not psutil.wait_procs(children, 10)[1]


@pytest.mark.slow
def test_a_model_is_unloaded_and_comes_back(models: list[str]) -> None:
    with running(models, "--unload-after", "1", "--pin", "small") as (process, address):
        assert [ask(address, name) for name in ("small", "large")] == ["small", "large"]
        end = time.monotonic() + 30
        while num_servers(process) != 1:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert ask(address, "large") == "large"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
