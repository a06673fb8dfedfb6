"""Text that a model writes to be calibrated on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qserve.calibration import generated
from qserve.calibration.generated import generated_windows
from qserve.checkpoint.errors import DataError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import open_model
from qserve.checkpoint.tokenizer import leading_tokens
from qserve.runtime.config import EngineConfig


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qserve" / "calibration"


def nothing(done: int, total: int) -> None:
    pass


@torch.no_grad()
def test_it_is_drawn_from_the_model_itself(tiny_model: Path) -> None:
    source = open_model(tiny_model)
    told: list[tuple[int, int]] = []
    windows = generated_windows(source, 70, 24, 0, lambda done, total: told.append((done, total)))
    assert windows.shape == (70, 24) and windows.dtype == torch.int64
    first = len(leading_tokens(source.tokenizer()))
    assert told[-1] == (70 * (23 - first), 70 * (23 - first))
    assert (windows[:, :first] == torch.tensor(leading_tokens(source.tokenizer()), dtype=torch.int64)).all()
    assert len(set(windows[:, first].tolist())) > 20
    # As likely as the model's own draws are, not as its favourites and not as tokens at random.
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    logprobs = model(windows).logits[:, first:-1].log_softmax(-1)
    drawn = logprobs.gather(-1, windows[:, first + 1 :, None]).mean()
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert abs(float(drawn + entropy)) < 0.1


def test_the_same_call_gives_the_same_and_finds_it_again(
    tiny_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(tiny_model)
    windows = generated_windows(source, 3, 16, 5, nothing)
    assert not torch.equal(generated_windows(source, 3, 16, 6, nothing), windows)
    (kept,) = (path for path in cache.iterdir() if torch.equal(generated._kept(path, 3, 16), windows))  # type: ignore[arg-type]
    kept.write_bytes(b"damaged")
    assert torch.equal(generated_windows(source, 3, 16, 5, nothing), windows)
    monkeypatch.setattr(generated, "Engine", None)  # nothing is computed again
    assert torch.equal(generated_windows(source, 3, 16, 5, nothing), windows)


def test_a_cache_that_cannot_be_written_is_no_failure(tiny_model: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("no directory")
    assert generated_windows(open_model(tiny_model), 2, 8, 0, nothing).shape == (2, 8)


def test_a_model_that_cannot_be_run_says_what_to_give_instead(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "EngineConfig", lambda **options: EngineConfig(kv_cache_memory=1, **options))
    with pytest.raises(DataError, match=r"cannot write its calibration text: .*; give --calibration a text file"):
        generated_windows(HFDirectory(tiny_model), 2, 8, 0, nothing)
    with pytest.raises(DataError, match="raise --sequence-length"):
        generated_windows(HFDirectory(tiny_model), 2, 1, 0, nothing)


def test_a_damaged_model_writes_nothing(tiny_model: Path, cache: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(tiny_model, tmp_path / "damaged"))
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="cannot write its calibration text: "):
        generated_windows(HFDirectory(out), 2, 8, 0, nothing)
    assert not cache.exists()
