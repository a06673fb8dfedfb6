"""Embeddings and output heads in few bits, tied or not, written by the pipeline and served: the logits of plain
transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qserve.checkpoint.source import ModelSource, open_model
from qserve.checkpoint.spec import ActivationScheme
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.kernels.reference import round_input
from qserve.kernels.triton.target import is_interpreted
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits

EMBEDDING = "model.embed_tokens"
VOCABULARY, WIDTH = 323, 100  # neither is a multiple of anything that kernels like; a row ends within a word
BITS = [(6, 0), (6, 6), (6, 8), (0, 6), (8, 0), (8, 6), (5, 0)]
ROUNDED = ActivationScheme("int8", "group", group_size=32)
TOKENS = torch.randint(0, VOCABULARY, (23,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def dense(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, head_dim=16, intermediate_size=132, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
        tie_word_embeddings=request.param, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("outer") / "dense"
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # with ones, inputs of products would be multiples of codes, and halves between two others
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    open_model(tiny_model).save_tokenizer(path)
    return path


def quantized(dense: Path, out: Path, embedding: int, head: int) -> ModelSource:
    job = QuantizeJob(bits=6, group_size=-1, method="rtn", calibration=None, embedding_bits=embedding, head_bits=head)
    pipeline.run(open_model(dense), out, job)
    return open_model(out)


def expected(dense: Path, packed: ModelSource, *, rounded: bool = False) -> torch.Tensor:
    """The logits of plain transformers in float32; the head is the embedding only where the configuration says so.
    ``rounded``: the inputs of packed weights, as the C kernels do."""
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    tensors = {name: packed.tensor(name).float() for name in packed.names()}
    tensors |= {f"{module}.weight": packed.linear(module).dequantize() for module in packed.linears()}
    if packed.config["tie_word_embeddings"]:
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors[f"{EMBEDDING}.weight"]
    else:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY, WIDTH))
    model.load_state_dict(tensors)
    stored_as = {"lm_head": EMBEDDING} if packed.config["tie_word_embeddings"] else {}
    for name, module in model.named_modules():
        if rounded and isinstance(module, torch.nn.Linear) and stored_as.get(name, name) in packed.linears():
            module.register_forward_pre_hook(lambda _, args: (round_input(args[0], ROUNDED),))
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS[None]).logits[0]
    return logits


def served(packed: ModelSource, kernels: str) -> torch.Tensor:
    limits = DecoderLimits(max_tokens=32, max_logits=32, max_positions=64, num_blocks=2)
    config = decoder_config(packed.config, packed.name)
    decoder = Decoder(packed, config, registry.make(kernels, threads=1), limits, kv_dtype=torch.float32)
    every = torch.arange(len(TOKENS), dtype=torch.int32)
    starts, table = torch.tensor([0, len(TOKENS)], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    step = Step(TOKENS.int(), every, every, starts, table, every)
    decoder.run(step)
    decoder.head(step, every)
    return decoder.logits[: len(TOKENS)].clone()


@pytest.mark.parametrize(("embedding", "head"), BITS)
def test_logits_are_those_of_the_dequantized_model(dense: Path, tmp_path: Path, embedding: int, head: int) -> None:
    packed = quantized(dense, tmp_path / "out", embedding, head)
    assert (EMBEDDING in packed.linears(), "lm_head" in packed.linears()) == (bool(embedding), bool(head))
    if embedding:
        assert packed.linear(EMBEDDING).scheme.bits == embedding
    tied = open_model(dense).config["tie_word_embeddings"]
    assert packed.config["tie_word_embeddings"] == (tied and not head)
    for kernels, limit in {"reference": 1e-5, "native": 5e-3, "triton": 1e-5}.items():
        if (kernels == "native" and native.missing()) or (kernels == "triton" and not is_interpreted()):
            continue
        got, want = served(packed, kernels), expected(dense, packed, rounded=kernels == "native")
        assert float((got - want).norm() / want.norm()) < limit, kernels


def test_six_bits_are_a_quarter_smaller_and_scored(dense: Path, tmp_path: Path) -> None:
    six, eight = (quantized(dense, tmp_path / str(bits), bits, 0) for bits in (6, 8))
    words = VOCABULARY * (-(-WIDTH * 8 // 32) - -(-WIDTH * 6 // 32))
    saved = eight.stored_bytes() - six.stored_bytes()
    assert 4 * words - 200 < saved < 4 * words + 200  # headers name other sizes
    config = EngineConfig(kv_cache_memory=1 << 18, kernels="reference", kv_cache_dtype="fp32", head="dense")
    scores = torch.cat([rows.clone() for _, rows in Engine(six, config).score(TOKENS.tolist())])
    torch.testing.assert_close(scores, expected(dense, six).log_softmax(-1)[: len(scores)], atol=1e-3, rtol=0)
