"""Families without a native decoder: both models go through transformers, quantized as their checkpoint says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, PersimmonConfig

from qserve.calibration.text import Text, load_text
from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.kv import is_kv
from qserve.checkpoint.source import ModelSource, open_model
from qserve.evals import quality, transformers_scorer
from qserve.evals.quality import EvalJob
from qserve.evals.transformers_scorer import TransformersScorer
from qserve.kernels.reference import round_input
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.engine import Engine
from tests.pretend_device import pretended

WINDOW = 48
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 200, "initializer_range": 0.3,
         "bos_token_id": None, "eos_token_id": 2}  # fmt: skip


def save(config: Gemma2Config | PersimmonConfig, tiny_model: Path, out: Path) -> Path:
    shutil.copytree(tiny_model, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def gemma(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, with capped logits and a (1 + weight) norm."""
    vocab = len(open_model(tiny_model).tokenizer())
    config = Gemma2Config(vocab_size=vocab, head_dim=16, pad_token_id=None, query_pre_attn_scalar=16, **SIZES)
    return save(config, tiny_model, tmp_path_factory.mktemp("gemma") / "gemma")


@pytest.fixture(scope="module")
def uncapped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a cap of scores, which would see that keys are centred."""
    config = Gemma2Config(
        vocab_size=len(open_model(tiny_model).tokenizer()), head_dim=16, pad_token_id=None, query_pre_attn_scalar=16,
        attn_logit_softcapping=None, **SIZES,
    )  # fmt: skip
    return save(config, tiny_model, tmp_path_factory.mktemp("uncapped") / "gemma")


@pytest.fixture(scope="module")
def persimmon(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = len(open_model(tiny_model).tokenizer())
    config = PersimmonConfig(vocab_size=vocab, **SIZES)
    return save(config, tiny_model, tmp_path_factory.mktemp("persimmon") / "persimmon")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("hello world, the lazy dog and the quick brown fox: user system. " * 10)
    return load_text(str(path), "evaluate")


@pytest.fixture(scope="module")
def job(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., QuantizeJob]:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(text.text[::-1])
    return lambda **options: QuantizeJob(
        **{"method": "rtn", "group_size": 16, "samples": 4, "sequence_length": 32, "calibration": str(path), **options}
    )


def rows(scorer: TransformersScorer, tokens: list[int]) -> Tensor:
    parts = list(scorer.score(tokens))
    starts = [start for start, _ in parts]
    assert starts == list(range(0, len(tokens), transformers_scorer._CHUNK))
    return torch.cat([part for _, part in parts])


@pytest.fixture
def tokens() -> list[int]:
    return torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()


def dense_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", ["gemma", "persimmon"])
def test_a_dense_model_is_scored_as_transformers_does(
    family: str, tokens: list[int], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.testing.assert_close(
        rows(TransformersScorer(open_model(path)), tokens), dense_logits(model, tokens), atol=1e-4, rtol=1e-4
    )


def rebuilt(dense: Path, result: ModelSource) -> Any:
    """The model ``dense`` of transformers' own, with the weights of ``result`` put in and its inputs rounded."""
    model: Any = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    with torch.no_grad():
        for name in result.names():
            if not is_kv(name):
                model.get_parameter(name).copy_(result.tensor(name))
        if "lm_head" in result.linears():  # no longer the embedding, where it was
            model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
        for name in result.linears():
            packed, module = result.linear(name), model.get_submodule(name)
            module.weight.copy_(packed.dequantize())
            if (scheme := packed.activations) is not None:
                assert (packed.input_scale is None) == scheme.dynamic
                module.register_forward_pre_hook(
                    lambda m, args, p=packed: (round_input(args[0], p.activations, p.input_scale),)
                )
    return model


@pytest.mark.parametrize(
    "options",
    [{"bits": 4}, {"bits": 4, "embedding_bits": 8}, {"embedding_bits": 6, "head_bits": 6}, {"scheme": "w8a8"},
     {"scheme": "fp8"}, {"scheme": "fp8-static"},
     {"scheme": "nvfp4"}],
)  # fmt: skip
def test_weights_are_dequantized_and_inputs_rounded(
    options: dict[str, Any], gemma: Path, job: Callable[..., QuantizeJob], tokens: list[int], tmp_path: Path
) -> None:
    pipeline.run(open_model(gemma), tmp_path / "out", job(**options))
    result = open_model(tmp_path / "out")
    found = rows(TransformersScorer(result), tokens)
    torch.testing.assert_close(found, dense_logits(rebuilt(gemma, result), tokens), atol=2e-3, rtol=2e-3)
    plain = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32).eval()
    assert float((found - dense_logits(plain, tokens)).abs().max()) > 0.02


@pytest.mark.parametrize("options", [{"scheme": "nvfp4"}, {"bits": 4, "kv_cache": "int8", "kv_granularity": "head"}])
def test_another_device_scores_the_same(
    options: dict[str, Any], gemma: Path, job: Callable[..., QuantizeJob], tokens: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pipeline.run(open_model(gemma), tmp_path / "out", job(**options))
    expected = rows(TransformersScorer(open_model(tmp_path / "out")), tokens)
    with pretended(monkeypatch) as device:
        monkeypatch.setattr(transformers_scorer, "device_for", lambda nbytes: device)
        found = rows(TransformersScorer(open_model(tmp_path / "out")), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_keys_and_values_are_rounded_as_the_cache_would_be(
    dtype: str, granularity: str, uncapped: Path, job: Callable[..., QuantizeJob], tokens: list[int], tmp_path: Path
) -> None:
    """Against a cache of transformers that rounds what is put into it."""
    pipeline.run(open_model(uncapped), tmp_path / "out", job(bits=8, kv_cache=dtype, kv_granularity=granularity))
    result = open_model(tmp_path / "out")

    class Rounding(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            rounded = []
            for states, letter in ((keys, "k"), (values, "v")):
                scale = result.tensor(f"model.layers.{layer}.self_attn.{letter}_scale").reshape(1, -1, 1, 1)
                center = torch.zeros(())
                if letter == "k":
                    center = result.tensor(f"model.layers.{layer}.self_attn.k_center")[None, :, None]
                    assert float(center.abs().max()) > 0.01
                scaled = (states - center) / scale
                codes = scaled.round().clamp(-127, 127) if dtype == "int8" else scaled.clamp(-448, 448).to(
                    torch.float8_e4m3fn).float()  # fmt: skip
                rounded.append(codes * scale + center)
            return super().update(*rounded, layer, *args, **kwargs)

    model = rebuilt(uncapped, result)
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), past_key_values=Rounding()).logits[0].log_softmax(-1)
    found = rows(TransformersScorer(result), tokens)
    # A code at a tie may fall either way.
    assert float((found - expected).abs().mean()) < 0.002
    assert float((found - dense_logits(model, tokens)).abs().mean()) > 0.01


def test_the_card_says_how_it_was_measured(
    persimmon: Path, job: Callable[..., QuantizeJob], text: Text, tmp_path: Path
) -> None:
    base = open_model(persimmon)
    evaluation = EvalJob(text, tokens=2 * WINDOW, window=WINDOW)
    quality.check(evaluation, base)
    pipeline.run(base, tmp_path / "out", job(bits=4))
    pair = quality.scorers(base, open_model(tmp_path / "out"), WINDOW)
    assert all(isinstance(scorer, TransformersScorer) for scorer in pair)
    card = quality.measure(*pair, evaluation).card
    assert card.kernel_path == "transformers (dequantized; no native decoder)"
    assert card.tokens == 2 * (WINDOW - 1) and 0.001 < card.kl_mean < 5 and 0 < card.top1_agreement < 1
    itself = quality.measure(pair[0], pair[0], evaluation).card
    assert itself.kl_mean == 0 and itself.top1_agreement == 1
    assert itself.perplexity == itself.perplexity_base == card.perplexity_base


def test_a_native_family_is_scored_by_the_engine(tiny_model: Path, tiny_packed: Path) -> None:
    pair = quality.scorers(open_model(tiny_model), open_model(tiny_packed), WINDOW)
    assert all(isinstance(scorer, Engine) for scorer in pair)


def test_what_cannot_be_scored_is_refused(persimmon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model(persimmon)
    with pytest.raises(UsageError, match="--window 200 must be below the context of persimmon, 200"):
        quality.scorers(source, source, 200)
    with pytest.raises(UsageError, match="--kernels reference: persimmon has no native decoder"):
        quality.scorers(source, source, WINDOW, kernels="reference")
    monkeypatch.setattr(transformers_scorer, "available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="persimmon is measured by transformers in float32"):
        TransformersScorer(source)
