"""``qserve run`` with vLLM's options, and with a file of options: what is taken, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.config import EngineConfig
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.speculative_config import SpeculativeConfig

Cli = Callable[..., Any]
Started = tuple[EngineConfig, ServerConfig]


@pytest.fixture
def started(cli: Cli, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """What a command would start; the model is not loaded, and nothing serves."""
    found: list[Any] = []

    def load(source: Any, config: EngineConfig, **_: Any) -> Any:
        found.append(config)
        raise InterruptedError

    def serve(load: Callable[[], Any], *, config: ServerConfig, sock: Any, opened: Any) -> None:
        with sock, pytest.raises(InterruptedError):
            load()
        found.append(config)

    monkeypatch.setattr("qserve.steps.load", load)
    monkeypatch.setattr("qserve.runtime.server.serve.serve", serve)

    def run(*options: object, name: str = "run", model: object = tiny_model) -> Started:
        found.clear()
        done = cli(name, *([model] if model else []), "--port", 0, *options)
        assert done.code == 0, done.err
        engine, server = found
        return engine, server

    return run


def test_an_example_of_vllm(started: Callable[..., Started]) -> None:
    engine, server = started(
        *("--tensor-parallel-size", 1, "-pp", 1, "--dtype", "auto", "--gpu-memory-utilization", 0.9),
        *("--max-model-len", 256, "--max-num-seqs=8", "--kv-cache-dtype", "bfloat16", "--seed", 3),
        *("--no-enable-prefix-caching", "--enforce-eager", "--swap-space=4", "--disable-log-requests"),
        *("--enable-chunked-prefill", "--no-trust-remote-code", "--block-size", 16, "--cpu-offload-gb", 0),
        *("--served-model-name", "a", "--served-model-name", "b", "--quantization", "gptq"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"),
        name="serve",
    )
    assert engine == EngineConfig(
        gpu_memory_utilization=0.9, max_model_len=256, max_num_seqs=8, kv_cache_dtype="bf16", seed=3,
        enable_prefix_caching=False, quantization="gptq",
    )  # fmt: skip
    assert server == ServerConfig(model_name="a", model_aliases=("b",), tool_format="llama")
    drafting = started("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 5}')[0]
    assert drafting.speculative_config == SpeculativeConfig("suffix", 5)
    asks = started("--speculative-config", '{"model": "small"}')[0]
    assert asks.speculative_config == SpeculativeConfig("draft_model", model="small")
    assert started("--speculative-config", "null")[0].speculative_config is None
    assert started("--enable-prefix-caching")[0].enable_prefix_caching
    assert started() == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data-parallel-size", 2), "--data-parallel-size 2 is not served: a model runs on one GPU"),
        (("-dp=2",), "-dp 2 is not served"),
        (("--data-parallel-size", "two"), "--data-parallel-size two is not served"),
        (("--data-parallel-size",), "--data-parallel-size  is not served"),
        (("--trust-remote-code",), "--trust-remote-code is not served: code that comes with a model is never run"),
        (("--no-enable-chunked-prefill",), "--no-enable-chunked-prefill is not served"),
        (("--speculative-config", '{"method": "mtp"}'), "method 'mtp' of --speculative-config is not served"),
        (("--speculative-config", "ngram"), "--speculative-config is no JSON"),
        (("--speculative-config", "[5]"), "--speculative-config is a JSON object"),
        (("--tool-call-parser", "xlam"), "unknown --tool-format 'xlam'"),
        (("--ssl-certfile", "cert.pem"), "--tls-cert and --tls-key are given together"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--gpu-memory-utilization", 2), "--gpu-memory-utilization must be above 0"),
        (("--served-model-name", "a", "--served-model-name", "a"), "--served-model-name"),
        (("--served-model-name", ""), "--served-model-name"),
        (("--uds", "s", "--host", "0.0.0.0"), "--uds takes the place of --host and --port"),
    ],
)
def test_what_is_not_served(cli: Cli, tiny_model: Path, options: tuple[object, ...], words: str) -> None:
    cli("run", tiny_model, *options).refused(2, words)


def test_a_file_of_options(started: Callable[..., Started], tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {tiny_model}\n"
        "max-model-len: 256\nmax_num_seqs: 8\nkv-cache-memory: 8MiB\ngpu-memory-utilization: 0.5\n"
        "enable-prefix-caching: false\nvllm-metrics: true\n"
        "served-model-name: [a, b]\napi-key: secret\n"
        "tensor-parallel-size: 1\nenforce-eager: true\n"
    )
    engine, server = started("--config", file, model=None)
    assert engine == EngineConfig(
        max_model_len=256, max_num_seqs=8, kv_cache_memory=8 << 20, gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert server == ServerConfig(
        model_name="a", model_aliases=("b",), api_keys=("secret",), vllm_metrics=True
    )
    engine, server = started(
        "--max-model-len", 128, "--enable-prefix-caching", "--served-model-name", "c", "--config", file
    )
    assert (engine.max_model_len, engine.max_num_seqs, engine.enable_prefix_caching) == (128, 8, True)
    assert (server.model_name, server.model_aliases) == ("c", ())
    file.write_text("# nothing\n")
    assert started("--config", file) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-modellen: 3", "'max-modellen' is no option of qserve run"),
        ("config: other.yaml", "'config' is no option"),
        ("max-num-seqs: 1.5", "--max-num-seqs"),
        ("max-num-seqs: [1]", "'max-num-seqs' must be a text or a number"),
        ("max-num-seqs:", "'max-num-seqs' must be a text or a number"),
        ("vllm-metrics: 1", "'vllm-metrics' must be true or false"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "'max_num_seqs' is given twice"),
        ("prefix-caching: true\nno-prefix-caching: true", "'no-prefix-caching' is given twice"),
        ("data-parallel-size: 4", "'data-parallel-size': 4 is not served"),
        ("- a", "must hold options"),
        ("a: [", "is no valid YAML"),
        ("\x00", "is no valid YAML"),
    ],
)
def test_files_that_are_refused(cli: Cli, tiny_model: Path, tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    done = cli("run", tiny_model, "--config", file)
    assert done.code == 2 and words in " ".join(done.err.split()) and "Traceback" not in done.err, done.err


def test_a_missing_file(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    cli("run", tiny_model, "--config", tmp_path / "none.yaml").refused(1, "none.yaml: No such file")


def test_options_are_those_of_the_command() -> None:
    """The table of what is no choice hides no option of the command."""
    from typer.main import get_command

    from qserve.cli import app
    from qserve.runtime.vllm_arguments import NO_CHOICE

    params = get_command(app).commands["run"].params  # type: ignore[attr-defined]
    flags = {flag.lstrip("-").replace("-", "_") for param in params for flag in (*param.opts, *param.secondary_opts)}
    assert not flags & NO_CHOICE.keys()
