from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from qserve.checkpoint.convert import convert
from qserve.checkpoint.demo import demo_path
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.gguf_config import llama3_factors
from qserve.checkpoint.gguf_undo import unpermute

TOKENS = torch.tensor([[1, 5, 90, 33, 7, 7, 64, 2, 11, 50]])

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def random_model(architecture: str, **changes: Any) -> Any:
    """A tiny model of transformers with random weights, biases and norms."""
    torch.manual_seed(0)
    extra = {"head_dim": 16} if architecture == "qwen3" else {}
    config = CONFIGS[architecture](**{**SIZES, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def llama_cpp_rows(tensor: Tensor, heads: int) -> Tensor:
    """The order llama.cpp stores: row 2i + h of a head holds row i + h * dim / 2, written index by index."""
    dim = tensor.shape[0] // heads
    order = [
        head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return tensor[torch.tensor(order)]


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def save_gguf(
    path: Path,
    model: Any,
    kind: Kind = Kind.F32,
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> Path:
    """Write a transformers model as llama.cpp's converter does; matrices in ``kind``, the rest in float32."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = llama_cpp_rows(tensor, heads)
        arrays[gguf_name(name)] = tensor.detach().to(torch.float32).numpy()
    arrays |= extra or {}
    if change is not None:
        change(arrays)
    for name, array in arrays.items():
        if array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=kind)
        elif array.ndim == 2 and kind is not Kind.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unfilled(config: Any):
    """A model whose every weight is to be loaded: random numbers for the demo's would take seconds."""
    with no_init_weights():
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def rebuilt(source: GGUFFile):
    """transformers' model made of nothing but our config and our tensors."""
    model = unfilled(AutoConfig.for_model(**source.config))
    config = model.config
    tensors = {name: source.tensor(name).to(torch.float32) for name in source.names()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    model.tie_weights()
    return model


def loaded_by_transformers(path: Path, named: Any):
    """The model as transformers' own GGUF loader makes it; of ``named`` it takes the names of the weights.
    ``from_pretrained(gguf_file=...)`` would ask for the package accelerate first; the function it calls does not."""
    found = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)
    model = unfilled(AutoConfig.for_model(**found["config"]))
    missing, unexpected = model.load_state_dict(found["tensors"], strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize(
    "architecture, changes, metadata",
    [
        ("llama", {}, {}),
        (
            "llama",
            {"tie_word_embeddings": True, "head_dim": 32},
            {"attention.key_length": 32, "attention.value_length": 32},
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        ("qwen2", {}, {}),
        (
            "qwen2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
        ),
        ("qwen3", {"tie_word_embeddings": True}, {}),
    ],
)
def test_logits_of_the_model_it_was_made_from(tmp_path, architecture, changes, metadata) -> None:
    model = random_model(architecture, **changes)
    source = GGUFFile(save_gguf(tmp_path / "m.gguf", model, metadata=metadata))
    assert source.config["model_type"] == architecture
    assert source.spec is None and source.linears() == [] and source.dtype() == torch.float16
    assert set(source.names()) | {"lm_head.weight"} == set(model.state_dict())
    for name in source.names():
        assert torch.equal(source.tensor(name), model.state_dict()[name]), name
        assert source.shape(name) == tuple(model.state_dict()[name].shape)
    torch.testing.assert_close(logits(rebuilt(source)), logits(model), rtol=1e-5, atol=1e-5)
    assert source.parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "kind, tolerance",
    [(Kind.F16, 1e-3), (Kind.BF16, 1e-2), (Kind.Q8_0, 1e-2), (Kind.Q4_0, 0.2), (Kind.Q4_1, 0.2)],
)
def test_block_types(tmp_path, architecture, kind, tolerance) -> None:
    model = random_model(architecture)
    source = GGUFFile(save_gguf(tmp_path / "m.gguf", model, kind))
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind, torch.float32)
    assert source.tensor(name).dtype == expected
    assert source.tensor("model.norm.weight").dtype == torch.float32
    assert source.keeps_float32("model.norm.weight") and not source.keeps_float32(name)
    for name in source.names():
        weight, stored = model.state_dict()[name], source.tensor(name).to(torch.float32)
        assert (weight - stored).abs().max() <= tolerance * weight.abs().max(), name
    assert logits(rebuilt(source)).isfinite().all()


def test_row_order_of_q_and_k_is_undone() -> None:
    weight = torch.arange(64 * 3.0).reshape(64, 3)
    assert torch.equal(unpermute(llama_cpp_rows(weight, 4), 4), weight)
    assert torch.equal(unpermute(llama_cpp_rows(weight[:, 0], 2), 2), weight[:, 0])
    assert not torch.equal(llama_cpp_rows(weight, 4), weight)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_same_model_as_the_loader_of_transformers(tmp_path, architecture) -> None:
    model = random_model(architecture)
    writer_metadata = {"rope.dimension_count": 16, "vocab_size": 96}
    path = save_gguf(tmp_path / "m.gguf", model, Kind.Q8_0, metadata=writer_metadata)
    ours = rebuilt(GGUFFile(path))
    oracle = loaded_by_transformers(path, ours)
    torch.testing.assert_close(logits(ours), logits(oracle), rtol=1e-4, atol=1e-4)


def test_llama3_rope_is_found_again_from_its_divisors(tmp_path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("llama", rope_parameters=rope, head_dim=64)
    plain = random_model(
        "llama", head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    divisors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    torch.testing.assert_close(llama3_factors(500000.0, 64, 32.0, 8192), torch.from_numpy(divisors))
    source = GGUFFile(
        save_gguf(
            tmp_path / "m.gguf",
            model,
            metadata={"attention.key_length": 64, "attention.value_length": 64},
            extra={"rope_freqs.weight": divisors},
        )
    )
    assert source.config["rope_scaling"] == {key: rope[key] for key in rope if key != "rope_theta"}
    assert not source.has("rope_freqs.weight")
    torch.testing.assert_close(logits(rebuilt(source)), logits(model), rtol=1e-5, atol=1e-5)

    with pytest.raises(CheckpointError, match="rule of Llama 3"):
        GGUFFile(
            save_gguf(
                tmp_path / "n.gguf",
                model,
                metadata={"attention.key_length": 64, "attention.value_length": 64},
                extra={"rope_freqs.weight": divisors[::-1].copy()},
            )
        )


def test_sliding_window_makes_it_a_mistral(tmp_path) -> None:
    source = GGUFFile(
        save_gguf(tmp_path / "m.gguf", random_model("llama"), metadata={"attention.sliding_window": 4})
    )
    assert source.config["model_type"] == "mistral" and source.config["sliding_window"] == 4
    assert rebuilt(source).config.sliding_window == 4


def slow_q4_k(block: bytes) -> list[float]:
    d, dmin = struct.unpack("<2e", block[:4])
    packed, codes = block[4:16], block[16:]
    values = []
    for j in range(8):
        if j < 4:
            scale, least = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            least = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        for i in range(32):
            byte = codes[32 * (j // 2) + i]
            values.append(d * scale * (byte >> 4 if j % 2 else byte & 15) - dmin * least)
    return values


def slow_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (d,) = struct.unpack("<e", block[208:])
    values = []
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        byte = low[64 * half + 32 * (quarter % 2) + lane]
        code = (byte >> 4 if quarter >= 2 else byte & 15) | (
            (high[32 * half + lane] >> (2 * quarter)) & 3
        ) << 4
        values.append(d * scales[i // 16] * (code - 32))
    return values


@pytest.mark.parametrize(
    "kind, size, slow, floats",
    [
        (Kind.Q4_K, 144, slow_q4_k, (0, 2)),
        (Kind.Q6_K, 210, slow_q6_k, (208,)),
    ],
)
def test_random_k_blocks_against_the_specification(tmp_path, kind, size, slow, floats) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (96, size), dtype=np.uint8)
    for at in floats:
        blocks[:, at : at + 2] = (rng.standard_normal(96) * 0.01).astype(np.float16)[:, None].view(np.uint8)
    model = random_model("qwen2", hidden_size=256, intermediate_size=256)

    def change(arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if array.ndim == 2:
                arrays[name] = np.zeros((array.shape[0], size), np.uint8)
        arrays["token_embd.weight"] = blocks

    source = GGUFFile(save_gguf(tmp_path / "m.gguf", model, kind, change=change))
    found = source.tensor("model.embed_tokens.weight")
    assert found.shape == (96, 256) and found.dtype == torch.float32
    expected = torch.tensor([slow(block.tobytes()) for block in blocks], dtype=torch.float64)
    torch.testing.assert_close(found.to(torch.float64), expected, rtol=1e-5, atol=1e-7)


# What is wrong with a file is said in one line that names it.


def test_not_a_gguf(tmp_path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match="no GGUF file") as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        GGUFFile(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("keep", [4, 6, 24, 100, 900, 0.5, 0.999])
def test_truncated(tmp_path, keep) -> None:
    path = save_gguf(tmp_path / "m.gguf", random_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)


def test_wrong_version_and_byte_order(tmp_path) -> None:
    path = save_gguf(tmp_path / "m.gguf", random_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[:4] + struct.pack("<I", 77) + content[8:])
    with pytest.raises(CheckpointError, match="version 77"):
        GGUFFile(path)
    path.write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])
    with pytest.raises(CheckpointError):
        GGUFFile(path)


def test_unsupported_tensor_type_is_named(tmp_path) -> None:
    model = random_model("llama")
    path = save_gguf(tmp_path / "m.gguf", model, extra={"blk.0.mystery": np.zeros(4, np.int32)})
    with pytest.raises(CheckpointError, match="stored as I32"):
        GGUFFile(path)
    # The type number of the first tensor, changed in the file: after its name, rank and dimensions.
    path = save_gguf(tmp_path / "n.gguf", model)
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"unknown type.*999"):
        GGUFFile(path)


def test_other_architectures_are_named(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="mamba"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"expert_count": 4}, "lacks llama.expert_used_count"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ({"rope.dimension_count": 8, "attention.key_length": 16}, "rotary"),
    ],
)
def test_settings_that_cannot_be_expressed_are_refused(tmp_path, metadata, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        GGUFFile(save_gguf(tmp_path / "m.gguf", random_model("llama"), metadata=metadata))


def test_heads_that_do_not_divide(tmp_path) -> None:
    model = random_model("llama")
    model.config.num_key_value_heads = 3
    with pytest.raises(CheckpointError, match="4 attention heads"):
        GGUFFile(save_gguf(tmp_path / "m.gguf", model, change=dict.clear))


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path) -> None:
    model = random_model("llama")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is missing"):
        GGUFFile(
            save_gguf(tmp_path / "a.gguf", model, change=lambda arrays: arrays.pop("blk.1.ffn_up.weight"))
        )
    with pytest.raises(CheckpointError, match=r"blk\.0\.mystery\.weight is unknown"):
        GGUFFile(
            save_gguf(tmp_path / "b.gguf", model, extra={"blk.0.mystery.weight": np.zeros(4, np.float32)})
        )
    with pytest.raises(CheckpointError, match=r"attn_k\.weight has shape"):
        GGUFFile(
            save_gguf(
                tmp_path / "c.gguf", model, extra={"blk.0.attn_k.weight": np.zeros((64, 64), np.float32)}
            )
        )
    with pytest.raises(CheckpointError, match="biases"):
        GGUFFile(save_gguf(tmp_path / "d.gguf", model, extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)}))


def test_no_tokenizer_and_wrong_names(tmp_path) -> None:
    source = GGUFFile(save_gguf(tmp_path / "m.gguf", random_model("llama")))
    with pytest.raises(CheckpointError, match="tokenizer"):
        source.tokenizer()
    with pytest.raises(CheckpointError, match="lacks the tensor"):
        source.tensor("model.layers.9.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match="not stored packed"):
        source.linear("model.layers.0.mlp.up_proj")


needs_demo = pytest.mark.skipif(not demo_path().is_file(), reason="the demo model is not in the cache")


def test_convert_reads_it_as_dense(tmp_path) -> None:
    source = GGUFFile(save_gguf(tmp_path / "x.gguf", random_model("llama"), Kind.Q8_0))
    with pytest.raises(UsageError, match="qserve quantize"):
        convert(source, tmp_path / "out", "gptq")
    with pytest.raises(CheckpointError, match="tokenizer"):  # it has none, so nothing could be served
        convert(source, tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


@pytest.fixture(scope="module")
def demo() -> GGUFFile:
    return GGUFFile(demo_path())


@pytest.mark.slow
@needs_demo
def test_demo_logits_agree_with_transformers(demo) -> None:
    ours = rebuilt(demo)
    oracle = loaded_by_transformers(demo_path(), ours)
    rebuilt_tensors = ours.state_dict()
    for name, tensor in oracle.state_dict().items():
        torch.testing.assert_close(rebuilt_tensors[name], tensor, rtol=0, atol=1e-6)
    tokens = demo.tokenizer()("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        a, b = ours(tokens).logits, oracle(tokens).logits
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert demo.tokenizer().decode(a[0, -1].argmax()).strip() == "Paris"
    assert math.isclose(demo.config["rms_norm_eps"], 1e-5) and demo.config["tie_word_embeddings"]
    assert demo.parameters() == 134_515_008


@needs_demo
def test_demo_tokenizer(demo, tmp_path) -> None:
    tokenizer = demo.tokenizer()
    texts = [
        "",
        " ",
        "Hello, world!",
        "  two  spaces\n\n\ttab \n",
        "Ünï©ödé 漢字 🙂🇩🇪 e\u0301",
        "don't I'll we've",
        "a\r\nb\u00a0c\u200bd",
        "def f(x):\n    return x ** 2  # 42",
        "<|im_start|>user\nhi<|im_end|>",
        "\x00\x7f",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"]
    assert ids[0] == 1 and ids[-1] == 2 == tokenizer.eos_token_id
    # Digits stand alone, also after several spaces: SmolLM's vocabulary was trained so.
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("x  512 a7")["input_ids"])
    assert pieces == ["x", "ĠĠ", "5", "1", "2", "Ġa", "7"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )

    from transformers import AutoTokenizer

    demo.save_tokenizer(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token == tokenizer.eos_token and again.all_special_tokens == tokenizer.all_special_tokens
    assert again.get_vocab() == tokenizer.get_vocab()
    for text in [*texts, "x  512 a7", chat]:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
