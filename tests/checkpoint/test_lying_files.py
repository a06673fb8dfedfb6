"""Model files that lie: GGUF headers that claim what is not there, and thousands of mutated GGUF and safetensors files.
Each is refused in one line, within a second, or read."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.hf import HFDirectory
from tests.checkpoint.formats import test_hqq as hqq
from tests.checkpoint.test_gguf_families import CASES, OLDER, as_llama_cpp, random_model, write
from tests.checkpoint.test_gguf_tokenizer import byte_level, metadata_of, trained

U32, F32, BOOL, STRING, ARRAY, U64, I32 = 4, 6, 7, 8, 9, 10, 5
SECONDS = 1.0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))
COUNTS = [
    u32(f"llama.{key}", value)
    for key, value in (
        ("context_length", 64), ("embedding_length", 32), ("feed_forward_length", 32), ("block_count", 1),
        ("attention.head_count", 2),
    )
]  # fmt: skip
EPS_KEY = "llama.attention.layer_norm_rms_epsilon"
EPS = pair(EPS_KEY, F32, struct.pack("<f", 1e-5))


def file(
    pairs: list[bytes], tensors: list[bytes] = [], *, keys: int | None = None, count: int | None = None,  # noqa: B006
    data: int = 4096, version: int = 3,
) -> bytes:
    """A GGUF file, with other counts than it has where they are given."""
    keys, count = len(pairs) if keys is None else keys, len(tensors) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, count, keys) + b"".join([*pairs, *tensors]) + bytes(data)


EMBEDDING = tensor("token_embd.weight", (32, 8))
LIES: dict[str, tuple[bytes, str]] = {
    "a million tensors": (file([ARCHITECTURE], count=1_000_000), "1,000,000 tensors"),
    "ten thousand tensors that are not there": (file([ARCHITECTURE], count=10_000), "truncated or damaged"),
    "2^63 tensors": (file([ARCHITECTURE], count=1 << 63), "9,223,372,036,854,775,808 tensors"),
    "2^64 - 1 keys": (file([ARCHITECTURE], keys=(1 << 64) - 1), "18,446,744,073,709,551,615 keys"),
    "a key longer than the file": (file([struct.pack("<Q", 1 << 62)]), "within its header"),
    "a string longer than the file": (
        file([text("general.architecture") + struct.pack("<IQ", STRING, 1 << 63)]), "within its header",
    ),
    "an array longer than the file": (
        file([pair("a", ARRAY, struct.pack("<IQ", U32, 1 << 40))]), "a claims 1,099,511,627,776 values",
    ),
    "strings that are not there": (
        file([pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 40))]), "a claims 1,099,511,627,776 strings",
    ),
    "a string of an array longer than the file": (
        file([pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 60))]), "a string of a is longer than the file",
    ),
    "an array of arrays": (
        file([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "a has a value of the unknown type 9",
    ),
    "a value of no type": (file([pair("a", 99, b"")]), "a has a value of the unknown type 99"),
    "a name of many lines": (file([ARCHITECTURE, pair("a\nb", BOOL, b"\1")]), "'a\\nb' is no name"),
    "a long name": (file([ARCHITECTURE], [tensor("a" * 1000, (1,))]), "aaa' is no name"),
    "a key twice": (file([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' is there twice"),
    "a version of the future": (file([], version=9), "version 9"),
    "the other byte order": (file([], version=3 << 24), "the other byte order"),
    "no architecture": (file([], [EMBEDDING]), "architecture 'None' is not supported"),
    "an architecture that is a number": (file([u32("general.architecture", 3)], [EMBEDDING]), "architecture '3'"),
    "an alignment of 3": (file([ARCHITECTURE, u32("general.alignment", 3)]), "general.alignment is 3"),
    "an alignment of 0": (file([ARCHITECTURE, u32("general.alignment", 0)]), "general.alignment is 0"),
    "a tensor beyond the file": (file([ARCHITECTURE], [tensor("a", (32, 1 << 30))]), "a ends at byte"),
    "a tensor that wraps around": (file([ARCHITECTURE], [tensor("a", (1 << 32, 1 << 32, 2))]), "a ends at byte"),
    "a tensor at an offset beyond the file": (
        file([ARCHITECTURE], [tensor("a", (32,), offset=(1 << 64) - 1)]), "a ends at byte",
    ),
    "a tensor of no dimensions": (file([ARCHITECTURE], [tensor("a", ())]), "a has 0 dimensions"),
    "a tensor of many dimensions": (file([ARCHITECTURE], [tensor("a", (1,) * 9)]), "a has 9 dimensions"),
    "a tensor of no type": (file([ARCHITECTURE], [tensor("a", (32,), 999)]), "a is stored in the unknown type 999"),
    "a tensor of half a block": (file([ARCHITECTURE], [tensor("a", (33,), 8)]), "rows of a have 33 elements"),
    "a tensor twice": (file([ARCHITECTURE], [EMBEDDING, EMBEDDING]), "token_embd.weight is there twice"),
    "an empty tensor": (file([ARCHITECTURE], [tensor("a", (0, 8))]), "a is empty"),
    "four billion blocks": (
        file([ARCHITECTURE, *COUNTS[:3], u32("llama.block_count", (1 << 31) - 1), COUNTS[4], EPS],
             [EMBEDDING, tensor("output_norm.weight", (32,))]),
        "blk.0.attn_norm.weight is missing",
    ),
    "a count below nothing": (
        file([ARCHITECTURE, pair("llama.embedding_length", I32, struct.pack("<i", -5))], [EMBEDDING]),
        "llama.embedding_length must be one number that counts, not -5",
    ),
    "a count that is a word": (
        file([ARCHITECTURE, pair("llama.embedding_length", STRING, text("many"))], [EMBEDDING]),
        "llama.embedding_length must be one number that counts, not 'many'",
    ),
    "a count that is a list": (
        file([ARCHITECTURE, pair("llama.embedding_length", ARRAY, struct.pack("<IQ2I", U32, 2, 1, 2))], [EMBEDDING]),
        "llama.embedding_length must be one number that counts",
    ),
    "heads that do not divide": (
        file([ARCHITECTURE, *COUNTS, u32("llama.attention.head_count_kv", 3), EPS], [EMBEDDING]),
        "2 attention heads do not divide into 3",
    ),
    "no heads": (
        file([ARCHITECTURE, *COUNTS[:4], u32("llama.attention.head_count", 0), EPS], [EMBEDDING]), "0 attention heads",
    ),
    "an epsilon that is no number": (
        file([ARCHITECTURE, *COUNTS, pair(EPS_KEY, F32, struct.pack("<f", float("nan")))], [EMBEDDING]),
        "layer_norm_rms_epsilon must be one number, not nan",
    ),
    "parts that are not there": (file([ARCHITECTURE, u32("split.count", 4)]), "one of several parts"),
}  # fmt: skip


def refusal(action: Callable[[], object]) -> str:
    """The one line with which ``action`` is refused, within a second."""
    began = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        action()
    assert time.process_time() - began < SECONDS
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("lie", LIES)
def test_a_gguf_file_that_lies_is_refused_in_one_line(lie: str, tmp_path: Path) -> None:
    content, words = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    said = refusal(lambda: GGUFFile(path))
    assert said.startswith(str(path)) and words in said


def test_ten_thousand_tensors_that_are_there(tmp_path: Path) -> None:
    names = [tensor(f"t{i}", (1,)) for i in range(10_000)]
    path = tmp_path / "m.gguf"
    path.write_bytes(file([ARCHITECTURE, *COUNTS, EPS], [EMBEDDING, *names]))
    assert "output_norm.weight is missing" in refusal(lambda: GGUFFile(path))


def mutated(content: bytes, rng: random.Random, head: int) -> bytes:
    """Some bytes changed, most of them in the first ``head``; a piece left out, doubled, or cut off."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        limit = head if rng.random() < 0.9 else len(data)
        at = rng.randrange(min(limit, len(data)) or 1)
        kind = rng.randrange(7)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 255, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1)))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 3, 7, 8, 9, 12, 99, (1 << 32) - 1)))
        elif kind == 4:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 5:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


def read_all(source: Any, tokenizer: bool) -> None:
    """What a command would read of a model."""
    for name in source.names():
        assert source.nbytes(name) < 1 << 24
        source.tensor(name)
    if tokenizer:
        source.tokenizer().encode("the quick brown fox")


def survives(action: Callable[[], object], content: bytes) -> bool:
    """Whether ``action`` is refused. It may succeed, too; nothing else may happen."""
    began = time.process_time()
    try:
        action()
        return False
    except CheckpointError as error:
        assert "\n" not in str(error), repr(str(error))[:1000]
        return True
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} in {len(content)} bytes") from error
    finally:
        assert time.process_time() - began < 5 * SECONDS


def with_vocabulary(path: Path, kind: str) -> tuple[bytes, int]:
    """A small GGUF model with a tokenizer, and the bytes of its header."""
    model, tensors = random_model("llama", {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                                            "vocab_size": 420, "attention_bias": False}, path)  # fmt: skip
    arrays = as_llama_cpp("llama", model.config, tensors)
    vocabulary = metadata_of(trained()) if kind == "llama" else {**byte_level(), "tokenizer.ggml.pre": "gpt-2"}
    written = write(path / "m.gguf", "llama", model.config, arrays, {}, vocabulary=vocabulary)
    content = written.read_bytes()
    return content, content.index(b"output_norm.weight") + 400


FUZZED = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_mutated_gguf_files(kind: str, tmp_path: Path) -> None:
    content, head = with_vocabulary(tmp_path, kind)
    path, rng = tmp_path / "fuzz.gguf", random.Random(kind)
    refused = 0
    for i in range(FUZZED * 3 // 10):
        path.write_bytes(data := mutated(content, rng, head))
        with_tokenizer = i % 10 == 0
        refused += survives(lambda to=with_tokenizer: read_all(GGUFFile(path), tokenizer=to), data)  # type: ignore[misc]
    assert refused > FUZZED // 10


@pytest.mark.slow
@pytest.mark.parametrize("case", {architecture: case for case, (_, architecture, _, _) in CASES.items()}.values())
def test_mutated_gguf_files_of_every_architecture(case: str, tmp_path: Path) -> None:
    kind, architecture, changes, says = CASES[case]
    model, tensors = random_model(kind, changes, tmp_path)
    arrays = as_llama_cpp(architecture, model.config, tensors, older=case in OLDER)
    content = write(tmp_path / "m.gguf", architecture, model.config, arrays, says).read_bytes()

    def read(path: Path) -> None:
        source = GGUFFile(path)
        for name in source.names():
            source.tensor(name)
        for module in source.linears():
            source.linear(module)

    read(tmp_path / "m.gguf")
    path, rng = tmp_path / "fuzz.gguf", random.Random(case)
    refused = 0
    for _ in range(60):
        path.write_bytes(data := mutated(content, rng, content.rindex(b".weight")))
        refused += survives(lambda: read(path), data)
    assert refused > 20


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "told"), [(3, True), (4, False)])
def test_mutated_hqq(bits: int, told: bool, tmp_path: Path) -> None:
    hqq.write(tmp_path, hqq.stored(bits), hqq.config(bits) if told else None)
    path, rng = tmp_path / "model.safetensors", random.Random(bits)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])

    def read() -> None:
        source = HFDirectory(tmp_path)
        for module in source.linears():
            source.linear(module).dequantize()

    read()
    refused = 0
    for _ in range(FUZZED // 20):
        path.write_bytes(data := mutated(content, rng, length + 8))
        refused += survives(read, data)
    assert refused > FUZZED // 50


@pytest.mark.slow
def test_mutated_safetensors(tmp_path: Path) -> None:
    _, _, changes, _ = CASES["qwen3"]
    random_model("qwen3", {**changes, "num_hidden_layers": 1, "vocab_size": 32}, tmp_path)
    path, rng = tmp_path / "model.safetensors", random.Random(1)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    refused = 0
    for _ in range(FUZZED * 4 // 10):
        path.write_bytes(data := mutated(content, rng, length + 8))
        refused += survives(lambda: read_all(HFDirectory(tmp_path), tokenizer=False), data)
    assert refused > FUZZED // 10


HEADERS: dict[str, dict[str, Any] | bytes] = {
    "offsets beyond the file": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 60]}},
    "offsets below nothing": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
    "a shape that does not fit": {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}},
    "a shape of words": {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 16]}},
    "no such dtype": {"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [4]}},
    "a list": b"[]",
    "brackets": b"[" * 100_000,
}


@pytest.mark.parametrize("lie", HEADERS)
def test_a_safetensors_file_that_lies_is_refused_in_one_line(lie: str, tmp_path: Path) -> None:
    header = HEADERS[lie]
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 4}')
    HFDirectory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(16))
    assert "model.safetensors" in refusal(lambda: read_all(HFDirectory(tmp_path), tokenizer=False))
