"""A head that the documents' script trains is served; to train it further makes it better."""

from __future__ import annotations

from pathlib import Path

from train_eagle3 import main

from qserve.runtime.config import EngineConfig
from qserve.runtime.eagle3_drafter import Eagle3Drafter
from qserve.runtime.engine import Engine
from qserve.runtime.speculative_config import SpeculativeConfig


def test_a_head_is_trained_in_two_calls_and_served(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox and the lazy dog " * 400, encoding="utf-8")
    given = [str(tiny_model), str(text), str(tmp_path), "--tokens", "2000", "--drafts", "64", "--depth", "2"]
    first = main([*given, "--seconds", "0"])
    then = main([*given, "--steps", "12", "--rate", "0.01"])
    assert len(first) == 2 and then[0] > first[0]
    config = SpeculativeConfig("eagle3", model=str(tmp_path / "head"), num_speculative_tokens=3)
    engine = Engine(str(tiny_model), EngineConfig(kv_cache_memory=1 << 20, threads=1, speculative_config=config))
    assert isinstance(engine.drafter, Eagle3Drafter)
    assert engine.drafter.model.hidden_layers == (0, 1)  # type: ignore[attr-defined]
