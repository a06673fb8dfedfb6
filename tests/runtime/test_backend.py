"""An engine serves whatever a backend loads, and no more than it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.source import ModelSource
from qserve.runtime.backend import CacheDescription, Limits, LoadedModel
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import MemoryPlan
from qserve.runtime.native_backend import NativeBackend
from qserve.runtime.runner import DecoderRunner, PromptSink, StepOutput
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.step_plan import StepPlan

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class Successor:
    """A model whose next token is the last one and 1. Counts the tokens of its largest step."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.largest = 0

    def run(self, plan: StepPlan, prompt_sink: PromptSink) -> StepOutput:
        self.largest = max(self.largest, sum(len(sequence.token_ids) for sequence in plan.sequences))
        sampling = [sequence for sequence in plan.sequences if sequence.num_sampled]
        tokens = torch.tensor([(sequence.token_ids[-1] + 1) % self.vocab_size for sequence in sampling])
        logits = torch.nn.functional.one_hot(tokens, self.vocab_size).float() if sampling else torch.empty(0, 1)
        return StepOutput(tuple(sequence.request_id for sequence in sampling), logits, tokens.int())


class SuccessorBackend:
    def load(
        self, source: ModelSource, config: EngineConfig, progress: object = None, planned: object = None,
        hidden_layers: object = (),
    ) -> LoadedModel:  # fmt: skip
        vocab_size = int(source.config["vocab_size"])
        self.runner = Successor(vocab_size)
        return LoadedModel(
            self.runner,
            CacheDescription(num_blocks=8, block_size=16),
            Limits(vocab_size, 4, max_model_len=40, max_num_batched_tokens=5, max_num_logits=4),
            MemoryPlan(0, 0, 0, 0, 8, 40),
            "by counting",
        )


def test_an_engine_serves_what_a_backend_loads(tiny_model: Path) -> None:
    backend = SuccessorBackend()
    engine = Engine(str(tiny_model), EngineConfig(max_num_seqs=4), backend=backend)
    prompts: list[str | list[int]] = [[10, 11, 12], list(range(20, 33)), [7]]
    found: dict[str, list[int]] = {}
    for output in engine.generate(prompts, [GREEDY] * 3):
        found.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == {"0": list(range(13, 19)), "1": list(range(33, 39)), "2": list(range(8, 14))}
    assert backend.runner.largest == 5  # tokens of a step
    assert engine.kernels == "by counting" and engine.stats().kv_blocks_used == 0
    engine.check()


def test_its_limits_are_the_engines(tiny_model: Path) -> None:
    engine = Engine(str(tiny_model), EngineConfig(max_num_seqs=4), backend=SuccessorBackend())
    assert engine.max_model_len == 40
    with pytest.raises(RequestError):
        engine.submit("long", [1] * 41, GREEDY)


def test_the_native_decoder_is_the_first_backend(tiny_model: Path) -> None:
    config = EngineConfig(kv_cache_memory=1 << 20, threads=1, max_num_seqs=3, max_num_batched_tokens=64)
    engine = Engine(str(tiny_model), config)
    loaded = NativeBackend().load(engine.source, config)
    assert isinstance(loaded.runner, DecoderRunner) and isinstance(engine.runner, DecoderRunner)
    assert loaded.limits == engine.limits
    assert (loaded.limits.max_num_batched_tokens, loaded.limits.max_num_logits) == (64, 3)
    assert loaded.cache == CacheDescription(engine.memory.num_blocks, 16)
