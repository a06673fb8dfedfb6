"""Perplexity, KL divergence and agreement against transformers' own float32 logits."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from qserve.calibration.text import Text, load_text
from qserve.calibration.windows import evaluation_windows
from qserve.checkpoint.errors import CheckpointError, DataError, UsageError
from qserve.checkpoint.source import open_model
from qserve.evals import quality
from qserve.evals.pieces import of_windows
from qserve.evals.quality import EvalJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

WINDOW = 40


@pytest.fixture(scope="module")
def perturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with noise on every weight."""
    out = tmp_path_factory.mktemp("models") / "perturbed"
    shutil.copytree(tiny_model, out)
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("hello world, the lazy dog and the quick brown fox: user system. " * 10)
    return load_text(str(path), "evaluate")


def engine(path: Path, **options: object) -> Engine:
    # Small chunks, so that a window is scored in several; the KV cache in float32, as transformers has it.
    config = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "kv_cache_dtype": "fp32", "threads": 1, **options}
    return Engine(open_model(path), EngineConfig(max_model_len=WINDOW + 1, **config))  # type: ignore[arg-type]


def log_probabilities(path: Path, windows: Tensor) -> Tensor:
    """float64 [windows, WINDOW - 1, vocab], for the tokens after the first."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(windows).logits[:, :-1].double().log_softmax(-1)


@pytest.fixture(scope="module")
def windows(tiny_model: Path, text: Text) -> Tensor:
    ids = open_model(tiny_model).tokenizer()(text.text, add_special_tokens=False)["input_ids"]
    return evaluation_windows(ids, 3 * WINDOW, WINDOW)


def test_compare_matches_an_independent_computation(tiny_model: Path, perturbed: Path, windows: Tensor) -> None:
    p, q = log_probabilities(tiny_model, windows), log_probabilities(perturbed, windows)
    target = windows[:, 1:, None]
    steps: list[tuple[int, int]] = []
    pair = engine(tiny_model), engine(perturbed)
    found = quality.compare(*pair, of_windows(windows), lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert found.tokens == 3 * (WINDOW - 1)
    close = {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(found.base_nll, -p.gather(-1, target).flatten(), **close)
    torch.testing.assert_close(found.nll, -q.gather(-1, target).flatten(), **close)
    torch.testing.assert_close(found.kl, (p.exp() * (p - q)).sum(-1).flatten(), **close)
    first, second = (torch.stack([p, q]).topk(2).values[..., rank] for rank in (0, 1))
    clear = (first - second > 1e-3).all(0).flatten()  # a near tie may fall either way in float32
    assert torch.equal(found.agree.bool()[clear], (p.argmax(-1) == q.argmax(-1)).flatten()[clear])
    assert clear.float().mean() > 0.9
    assert 0 < found.agree.mean() < 1 and found.kl.mean() > 0.01


def test_measure_sums_up_what_compare_finds(tiny_model: Path, perturbed: Path, windows: Tensor, text: Text) -> None:
    p, q = log_probabilities(tiny_model, windows), log_probabilities(perturbed, windows)
    job = EvalJob(text, tokens=3 * WINDOW + 5, window=WINDOW)
    card = quality.measure(engine(tiny_model), engine(perturbed), job).card
    target = windows[:, 1:, None]
    kl = (p.exp() * (p - q)).sum(-1).flatten().sort().values
    assert card.tokens == 3 * (WINDOW - 1) == len(kl) and card.window == WINDOW
    assert card.perplexity_base == pytest.approx(math.exp(-p.gather(-1, target).mean()), rel=1e-3)
    assert card.perplexity == pytest.approx(math.exp(-q.gather(-1, target).mean()), rel=1e-3)
    assert card.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert card.kl_median == pytest.approx(float(kl[len(kl) // 2]), rel=1e-3)
    assert float(kl[int(0.85 * len(kl))]) < card.kl_p90 < float(kl[int(0.95 * len(kl))])
    assert card.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert (card.base_name, card.data_name, card.data_sha256) == ("tiny", "some.txt", text.sha256)
    assert card.base_sha256 == open_model(tiny_model).sha256()


def test_a_measurement_that_is_cut_short_goes_on(
    tiny_model: Path, perturbed: Path, text: Text, tmp_path: Path
) -> None:
    base, model = engine(tiny_model), engine(perturbed)
    job, kept = EvalJob(text, tokens=3 * WINDOW, window=WINDOW), tmp_path / "kept"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quality.measure(base, model, job, stop, kept)
    steps: list[int] = []
    found = quality.measure(base, model, job, lambda done, _: steps.append(done), kept)
    whole = quality.measure(base, model, job)
    assert steps == [3] and found.card == whole.card
    assert all(torch.equal(value, whole.found.tensors()[name]) for name, value in found.found.tensors().items())
    steps.clear()
    quality.measure(base, engine(tiny_model), job, lambda done, _: steps.append(done), kept)
    assert steps == [1, 2, 3], "what was kept was of another model"
    kept.write_bytes(b"damaged")
    assert quality.measure(base, model, job, None, kept).card == whole.card


def test_a_model_is_exactly_itself(tiny_model: Path, windows: Tensor) -> None:
    found = quality.compare(engine(tiny_model), engine(tiny_model), of_windows(windows))
    assert bool((found.kl == 0).all()) and bool((found.agree == 1).all())
    assert torch.equal(found.nll, found.base_nll)


def test_what_is_measured_does_not_depend_on_the_chunks(tiny_model: Path, perturbed: Path, windows: Tensor) -> None:
    small = quality.compare(engine(tiny_model), engine(perturbed), of_windows(windows))
    whole = {"max_num_batched_tokens": 64, "max_num_seqs": 64}
    large = quality.compare(engine(tiny_model, **whole), engine(perturbed, **whole), of_windows(windows))
    tolerance = 0.0 if engine(tiny_model).kernels.startswith("native") else 1e-4
    for name in ("base_nll", "nll", "kl"):
        torch.testing.assert_close(getattr(small, name), getattr(large, name), atol=tolerance, rtol=0)
    with pytest.raises(DataError, match="different chunks"):
        quality.compare(engine(tiny_model), engine(perturbed, **whole), of_windows(windows))


def test_a_model_that_computes_nan_is_damaged(tiny_model: Path, windows: Tensor, tmp_path: Path) -> None:
    out = shutil.copytree(tiny_model, tmp_path / "nan")
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(out)
    with pytest.raises(CheckpointError, match="nan computes NaN"):
        quality.compare(engine(tiny_model), engine(out), of_windows(windows))


def test_text_and_window_limits(tiny_model: Path, text: Text) -> None:
    source = open_model(tiny_model)
    assert quality.eval_config(511, [source]).max_model_len == 512
    with pytest.raises(UsageError, match="--window 512 must be below the context of tiny, 512"):
        quality.eval_config(512, [source])
    one = engine(tiny_model)
    with pytest.raises(DataError, match="need 99,960 tokens"):
        quality.measure(one, one, EvalJob(text, tokens=99_999, window=WINDOW))
