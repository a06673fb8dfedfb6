"""Bad input through the command line: one line, the right exit code, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
RTN = ("--method", "rtn", "--group-size", "32", "--calibration", "none")
SCORED = ("--tokens", "128", "--window", "32")
GPTQ = ("--method", "gptq", "--group-size", "32", "--samples", "4", "--sequence-length", "64", "--calibration")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "out"


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path) -> Any:
    """Whatever a test refuses, the directory of OUT stays empty: no checkpoint, no staging directory."""
    (tmp_path / "checkpoints").mkdir()
    yield
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.fixture
def damaged(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoiled."""
    return Path(shutil.copytree(tiny_model, tmp_path / "damaged"))


def reconfigure(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Options that contradict themselves or each other: (command, options, exit code, words of the line).
OPTIONS = [
    ("quantize", ("--bits", "7"), 2, ("bits must be", "7")),
    ("quantize", ("--bits", "four"), 2, ("--bits",)),
    ("quantize", ("--group-size", "7"), 2, ("group size", "7")),
    ("quantize", ("--method", "magic"), 2, ("rtn, hqq, gptq, yaqa, awq", "magic")),
    ("quantize", ("--scheme", "w9"), 2, ("--scheme must be", "w9")),
    ("quantize", ("--scheme", "trellis", "--bits", "8"), 2, ("trellis weights have 2 or 3 or 4 bits",)),
    ("quantize", ("--scheme", "trellis", "--asym"), 2, ("no zero points",)),
    ("quantize", ("--scheme", "trellis", "--format", "gptq"), 2, ("the GPTQ format holds integers",)),
    ("quantize", ("--scheme", "trellis", "--for", "vllm"), 2, ("a layout of qserve's own",)),
    ("quantize", ("--format", "onnx"), 2, ("onnx", "compressed-tensors")),
    ("quantize", ("--minimize", "size"), 2, ("--max-kl",)),
    ("quantize", ("--minimize", "time", "--max-kl", "1"), 2, ("--minimize", "time")),
    ("quantize", ("--target-bits", "4", "--scheme", "fp8"), 2, ("mixed precision",)),
    ("quantize", ("--target-bits", "4", "--minimize", "size", "--max-kl", "1"), 2, ("mixed precision",)),
    ("quantize", ("--kv-cache", "fp4"), 2, ("--kv-cache", "fp4")),
    ("quantize", ("--head", "3"), 2, ("--head", "3")),
    ("quantize", ("--max-memory", "much"), 2, ("much",)),
    ("quantize", ("--method", "gptq"), 2, ("gptq needs calibration text",)),
    ("quantize", ("--samples", "0"), 2, ("--samples",)),
    ("quantize", ("--seed", "-1"), 2, ("--seed",)),
    ("quantize", ("--for", "nonsense"), 2, ("nonsense", "vllm")),
    ("quantize", ("--for", "vllm", "--bits", "2"), 2, ("vllm would refuse",)),
    ("quantize", ("--max-ppl-increase", "abc"), 2, ("--max-ppl-increase", "abc", "3%")),
    ("quantize", ("--max-ppl-increase", "-1%"), 2, ("--max-ppl-increase",)),
    ("quantize", ("--max-kl", "nan"), 2, ("--max-kl",)),
    ("quantize", ("--max-kl", "-1"), 2, ("--max-kl",)),
    ("quantize", ("--min-top1", "150%"), 2, ("--min-top1", "150%")),
    ("quantize", ("--max-kl", "1", "--window", "1"), 2, ("--window",)),
    ("quantize", ("--max-kl", "1", "--tokens", "31", "--window", "32"), 2, ("--tokens 31", "32")),
    ("quantize", ("--what",), 2, ("--what",)),
    ("eval", ("--window", "1"), 2, ("--window",)),
    ("eval", ("--window", "64", "--tokens", "63"), 2, ("--tokens 63", "64")),
    ("eval", ("--window", "1024"), 2, ("--window 1024", "context", "512")),
    ("eval", (*SCORED, "--kernels", "fast"), 2, ("fast", "reference")),
    ("eval", (*SCORED, "--threads", "0"), 2, ("--threads",)),
    ("run", ("--kv-cache-memory", "nonsense"), 2, ("512MiB", "nonsense")),
    ("run", ("--kv-cache-memory", "1"), 1, ("--kv-cache-memory", "0 blocks")),
    ("run", ("--kv-cache-memory", "999999GB"), 1, ("--kv-cache-memory", "exceeds", "GiB")),
    ("run", ("--kv-cache-dtype", "fp4"), 2, ("fp8", "fp16")),
    ("run", ("--max-model-len", "513"), 1, ("--max-model-len 513", "context of 512")),
    ("run", ("--max-num-seqs", "0"), 2, ("--max-num-seqs",)),
    ("run", ("--max-num-seqs", "64", "--max-num-batched-tokens", "8"), 2, ("--max-num-batched-tokens",)),
    ("run", ("--kernels", "fast"), 2, ("fast", "reference")),
    ("run", ("--generation-config", "nowhere", "--kv-cache-memory", "1"), 2, ("auto, vllm or a file", "nowhere")),
    ("run", ("--autotune", "--kernels", "reference"), 2, ("--autotune", "no configurations")),
    ("bench", ("--limit", "9"), 2, ("--limit", "word kernels")),
    ("run", ("--cpu-list", "one"), 2, ("--cpu-list", "0,2-3", "one")),
    ("run", ("--cpu-list", "3-1"), 2, ("--cpu-list", "3-1")),
    ("run", ("--cpu-list", "0,0"), 2, ("--cpu-list", "once")),
    ("run", ("--cpu-list", "0", "--threads", "2"), 2, ("--cpu-list", "--threads")),
    ("run", ("--cpu-list", "8191"), 1, ("--cpu-list", "8191")),
    ("run", ("--cpu-list", "0", "--kernels", "reference"), 1, ("--cpu-list", "native")),
    ("run", ("--port", "70000"), 1, ("70000", "65535")),
    ("run", ("--api-key", ""), 2, ("--api-key",)),
    ("bench", ("--concurrency", "1,x"), 2, ("--concurrency", "1,x")),
    ("bench", ("--cpu-list", "0,x"), 2, ("--cpu-list", "0,x")),
    ("bench", ("--output", "0"), 2, ("--output",)),
    ("bench", ("--min-ratio", "1=3"), 2, ("--against",)),
    ("bench", ("--concurrency", "1", "--prompt", "500", "--output", "500"), 1, ("512",)),
    ("demo", ("--samples", "0"), 2, ("--samples", "at least 1")),
    ("demo", ("--samples", "few"), 2, ("--samples",)),
    ("demo", ("--effort", "best"), 2, ("--effort", "fast or normal", "best")),
    ("demo", ("--tokens", "511"), 2, ("--tokens", "512", "511")),
]


@pytest.mark.parametrize(
    ("command", "options", "code", "words"), OPTIONS, ids=[f"{case[0]} {' '.join(case[1])}" for case in OPTIONS]
)
def test_options(
    cli: Cli,
    command: str,
    options: tuple[str, ...],
    code: int,
    words: tuple[str, ...],
    tiny_model: Path,
    tiny_packed: Path,
    text_file: Path,
    out: Path,
) -> None:
    before: dict[str, tuple[object, ...]] = {
        "quantize": (tiny_model, out, *RTN, "--data", text_file),
        "eval": (tiny_packed, "--against", tiny_model, "--data", text_file),
        "run": (tiny_packed, *([] if "--port" in options else ["--port", "0"])),
        "bench": (tiny_packed,),
        "demo": ("--out", out),
    }
    cli(command, *before[command], *options).refused(code, *words)


@pytest.mark.parametrize("command", ["quantize", "inspect", "eval", "against", "run", "bench"])
def test_missing_model(
    cli: Cli, command: str, tiny_model: Path, tiny_packed: Path, text_file: Path, out: Path, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere" / "deep" / "model"
    arguments: dict[str, tuple[object, ...]] = {
        "quantize": ("quantize", nowhere, out, *RTN),
        "inspect": ("inspect", nowhere),
        "eval": ("eval", nowhere, "--against", tiny_model, "--data", text_file),
        "against": ("eval", tiny_packed, "--against", nowhere, "--data", text_file),
        "run": ("run", nowhere, "--port", 0),
        "bench": ("bench", nowhere),
    }
    cli(*arguments[command]).refused(1, str(nowhere), "does not exist")


def spoil_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')


def truncate_weights(model: Path) -> None:
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)


def remove_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


SPOILERS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "corrupt config.json": (spoil_config, ("config.json is not valid JSON",)),
    "truncated safetensors": (truncate_weights, ("model.safetensors", "truncated", "expected")),
    "no safetensors": (remove_weights, ("model.safetensors",)),
    "another architecture": (lambda model: reconfigure(model, model_type="gpt2"), ()),
    "unknown architecture": (lambda model: reconfigure(model, model_type="bogus"), ("bogus",)),
    "sizes that do not fit": (lambda model: reconfigure(model, intermediate_size=256), ("model.layers.0.mlp",)),
}


@pytest.mark.parametrize("command", ["quantize", "run", "eval"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_damaged_model(
    cli: Cli, spoiler: str, command: str, damaged: Path, tiny_model: Path, text_file: Path, out: Path
) -> None:
    spoil, words = SPOILERS[spoiler]
    spoil(damaged)
    arguments: dict[str, tuple[object, ...]] = {
        "quantize": ("quantize", damaged, out, *RTN),
        "run": ("run", damaged, "--port", 0),
        "eval": ("eval", damaged, "--against", tiny_model, "--data", text_file, *SCORED),
    }
    cli(*arguments[command]).refused(1, *words)


def test_a_damaged_checkpoint_is_found_by_its_hashes(cli: Cli, tiny_packed: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_packed, tmp_path / "flipped")
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\x55" * 8)
    cli("verify", model).refused(1, "model.safetensors")


def test_already_quantized(cli: Cli, tiny_packed: Path, out: Path) -> None:
    cli("quantize", tiny_packed, out, *RTN).refused(2, "already quantized")


def test_out_is_not_empty(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("mine")
    cli("quantize", tiny_model, full, *RTN).refused(1, "not empty", "--overwrite")
    cli("quantize", tiny_model, full, *RTN, "--overwrite").refused(1, "no checkpoint")
    cli("quantize", tiny_model, full / "precious.txt", *RTN).refused(1, "is a file")
    cli("quantize", tiny_model, tiny_model, *RTN, "--overwrite").refused(2, "the model itself")
    assert [path.name for path in full.iterdir()] == ["precious.txt"]


def test_no_tokenizer(cli: Cli, damaged: Path, text_file: Path, out: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (damaged / name).unlink()
    cli("quantize", damaged, out, *GPTQ, text_file).refused(1, "no tokenizer")
    cli("run", damaged, "--port", 0).refused(1, "no tokenizer")
    cli("bench", damaged).refused(1, "no tokenizer")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, ("cannot be read",)),
        (b"\xff", ("cannot be read",)),
        (b"{{ messages[0].content }}\n{% for m in messages %}", (", line 2", "cannot be rendered")),
        (b"{{ messages[0].content | shout }}", ("cannot be rendered", "shout")),
        (b"{{ messages[0].content[0].text }}", ("leaves out",)),
        (b"{{ raise_exception('no users') }}", ("cannot be rendered", "no users")),
        (b"Hello.", ("leaves out what a user says",)),
    ],
)
def test_a_chat_template_that_cannot_be_used(
    cli: Cli, tiny_model: Path, tmp_path: Path, template: bytes | None, words: tuple[str, ...]
) -> None:
    """It is known before a weight is read: this server's cache would be refused, too."""
    file = tmp_path / "template.jinja"
    if template is not None:
        file.write_bytes(template)
    refused = cli("run", tiny_model, "--port", 0, "--kv-cache-memory", 1, "--chat-template", file)
    refused.refused(2, "--chat-template", str(file), *words)


def test_a_tokenizer_with_more_tokens_than_the_model(
    cli: Cli, damaged: Path, tiny_packed: Path, text_file: Path, out: Path
) -> None:
    reconfigure(damaged, vocab_size=100)
    cli("quantize", damaged, out, *GPTQ, text_file).refused(1, "tokenizer has", "the model 100")
    cli("run", damaged, "--port", 0).refused(1, "tokenizer has", "the model 100")
    cli("eval", tiny_packed, "--against", damaged, "--data", text_file, *SCORED).refused(1, "the model 100")


def test_a_base_with_another_tokenizer(cli: Cli, damaged: Path, tiny_packed: Path, text_file: Path) -> None:
    path = damaged / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    cli("eval", tiny_packed, "--against", damaged, "--data", text_file, *SCORED).refused(1, "different tokenizers")
    assert not (tiny_packed / "quality_card.json").exists()


def test_binary_text(cli: Cli, tiny_model: Path, tiny_packed: Path, out: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(bytes(range(256)) * 20)
    cli("quantize", tiny_model, out, *GPTQ, binary).refused(1, str(binary), "not UTF-8")
    cli("quantize", tiny_model, out, *RTN, "--max-kl", 1, "--data", binary).refused(1, str(binary))
    cli("eval", tiny_packed, "--against", tiny_model, "--data", binary).refused(1, str(binary))


def test_text_that_does_not_exist(cli: Cli, tiny_model: Path, out: Path, tmp_path: Path) -> None:
    cli("quantize", tiny_model, out, *GPTQ, tmp_path / "no.txt").refused(1, "no.txt does not exist")
    cli("quantize", tiny_model, out, *GPTQ, tmp_path).refused(1, "is a directory")


def test_text_too_short(cli: Cli, tiny_model: Path, tiny_packed: Path, out: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the quick brown fox " * 5)
    cli("quantize", tiny_model, out, *GPTQ, short).refused(1, "4 samples of 64 tokens need 256 tokens", "the text has")
    options = ("--against", tiny_model, "--data", short, *SCORED)
    cli("eval", tiny_packed, *options).refused(1, "4 windows of 32 tokens need 128 tokens", "--tokens")
    cli("quantize", tiny_model, out, *RTN, "--max-kl", 1, "--data", short, *SCORED).refused(1, "need 128 tokens")


def test_samples_longer_than_the_context(cli: Cli, tiny_model: Path, text_file: Path, out: Path) -> None:
    cli("quantize", tiny_model, out, *GPTQ, text_file, "--sequence-length", 513).refused(2, "--sequence-length 513")


def test_port_in_use(cli: Cli, tiny_packed: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cli("run", tiny_packed, "--port", port).refused(1, f"port {port}", "in use", "--port")


def test_garbage_gguf(cli: Cli, out: Path, tmp_path: Path) -> None:
    for content in (b"", b"garbage", b"GGUF" + b"\xff" * 100, b"GGUF\x03\0\0\0" + b"\0" * 8):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        for arguments in (("inspect", path), ("quantize", path, out, *RTN), ("run", path, "--port", 0)):
            cli(*arguments).refused(1, str(path))


def test_a_report_that_cannot_be_written(
    cli: Cli, tiny_model: Path, tiny_packed: Path, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    options = ("--against", tiny_model, "--data", text_file, *SCORED, "--no-card")
    cli("eval", tiny_packed, *options, "--json", tmp_path / "file" / "r.json").refused(1, "r.json")


def test_wrong_command_line(cli: Cli) -> None:
    cli("frobnicate").refused(2, "frobnicate")
    cli("quantize", "model").refused(2, "OUT")
    cli("eval", "model").refused(2, "--against")


@pytest.mark.slow
def test_no_space_left(tiny_model: Path, out: Path, tmp_path: Path) -> None:
    """The forecast fits a disk of 144 KiB; the last files do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    # In a mount namespace of its own, so that the disk goes with the process.
    private = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=144k none {disk}"
    quantize = [sys.executable, "-m", "qserve", "quantize", str(tiny_model)]
    if shutil.which("unshare") and subprocess.run([*private, mount], capture_output=True).returncode == 0:
        command = shlex.join([*quantize, str(disk / "out"), *RTN])
        script = f"{mount} && {{ {command}; code=$?; ls -A {disk}; exit $code; }}"
        done = subprocess.run([*private, script], capture_output=True, text=True)
    else:  # where mounting is not permitted, a limit on the size of files fails a write midway, too
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (65536, 65536))
        done = subprocess.run([*quantize, str(out), *RTN], capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1 and done.stdout == "", done.stdout + done.stderr
    assert len(re.findall("^error: no space left", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_no_traceback_without_debug(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qserve", "inspect", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
