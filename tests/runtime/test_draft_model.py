"""A draft model: what it guesses changes how many steps an answer takes, and nothing else; when it is asked."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.checkpoint.source import open_model
from qserve.runtime.blocks import BlockManager
from qserve.runtime.cache import tokens_held
from qserve.runtime.config import EngineConfig
from qserve.runtime.draft_model import DraftModel, Span
from qserve.runtime.engine import Engine
from qserve.runtime.model_drafter import ModelDrafter
from qserve.runtime.request import Request
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.speculative_config import SpeculativeConfig
from tests.runtime.test_drafts import GREEDY, Answers, answers_of, each_config, prompt
from tests.tiny_model import save_tiny_model

SMALL: dict[str, Any] = {"kv_cache_memory": 1 << 20, "threads": 1}
KINDS = ("itself", "random", "windowed")


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models for the tiny model: itself, another one made at random, and one whose keys leave a window."""
    root = tmp_path_factory.mktemp("drafts")
    windowed = root / "windowed"
    shutil.copytree(tiny_model, windowed, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(1)
    MistralForCausalLM(MistralConfig(
        vocab_size=len(open_model(tiny_model).tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=21, max_position_embeddings=90,
    )).save_pretrained(windowed)  # fmt: skip
    return {"itself": tiny_model, "random": save_tiny_model(root / "random", width=32, layers=1), "windowed": windowed}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> tuple[Answers, int]:
    answers, _, steps = answers_of(tiny_model)
    return answers, steps


class Eager(ModelDrafter):
    """Believes that further rows and the draft model cost next to nothing; with a ``seed``, guesses at random whether
    guesses are right. Checks itself."""

    def __init__(
        self, target: Path, draft: Path, *, blocks: int | None = None, seed: int | None = None, tokens: int = 64,
        ranks: int = 1, **options: int,
    ) -> None:  # fmt: skip
        config = EngineConfig(**SMALL, max_num_seqs=16, max_num_batched_tokens=tokens, tensor_parallel_size=ranks)
        source = open_model(str(target))
        model = DraftModel.load(str(draft), config, source, source.tokenizer().get_vocab())
        if blocks is not None:
            windows = model.blocks.windows
            model.blocks = BlockManager(blocks, 16, windows=windows)
            model.max_model_len = tokens_held(blocks, 16, windows, model.max_model_len)
        super().__init__(model, SpeculativeConfig("draft_model", model=str(draft), **options), 64, model.vocab_size)
        for rows in range(1, 65):
            for _ in range(4):
                super().timed(rows, 1 + rows / 1000)
        self._chance = None if seed is None else random.Random(seed)

    def timed(self, rows: int, seconds: float) -> None:
        pass

    def draft(self, requests: Any) -> Any:
        if self._chance is not None:
            self._everyone.right[0] = self._everyone.tried[0] * self._chance.random()
            self._credit = 1e9 * self._chance.randrange(2)
        found = super().draft(requests)
        self._draft_costs._entries.clear()  # nothing is known of its time
        self._draft_costs._table = None
        self.check()
        return found


@pytest.mark.parametrize("kind", KINDS)
@each_config
def test_nobodys_answer_changes(
    tiny_model: Path, drafts: dict[str, Path], plain: tuple[Answers, int], kind: str, config: dict[str, Any]
) -> None:
    drafter = Eager(tiny_model, drafts[kind], seed=1, tokens=config.get("max_num_batched_tokens", 64))
    found, engine, steps = answers_of(tiny_model, drafter, **config)
    assert found == plain[0] and engine.stats().num_draft_tokens > 50
    assert bool(engine.scheduler.num_preemptions) == ("kv_cache_memory" in config)
    if kind == "itself" and not config:
        assert steps < plain[1] and engine.stats().num_accepted_tokens > 50


@pytest.mark.slow
def test_it_drafts_for_a_model_on_several_ranks(
    tiny_model: Path, drafts: dict[str, Path], plain: tuple[Answers, int]
) -> None:
    """The rank that plans computes it alone."""
    drafter = Eager(tiny_model, drafts["itself"], seed=1, ranks=2)
    config = SpeculativeConfig.of({"model": str(drafts["random"])})
    found, engine, _ = answers_of(tiny_model, drafter, tensor_parallel_size=2, speculative_config=config)
    assert found == plain[0] and engine.stats().num_accepted_tokens > 50
    assert any("2 ranks" in note for note in engine.notes) and engine.notes[-1].startswith("draft model random: ")
    engine.close()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_nobodys_answer_changes_whatever_room_and_trust_there_is(
    tiny_model: Path, drafts: dict[str, Path], plain: tuple[Answers, int], data: st.DataObject
) -> None:
    seats = data.draw(st.integers(2, 16))
    config = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": data.draw(st.integers(seats, 80)),
        "kv_cache_memory": data.draw(st.integers(45_100, 200_000)),
        "enable_prefix_caching": data.draw(st.booleans()),
    }
    drafter = Eager(
        tiny_model, drafts[data.draw(st.sampled_from(KINDS))], blocks=data.draw(st.integers(2, 40)),
        seed=data.draw(st.integers(0, 1 << 30)), tokens=data.draw(st.integers(16, 80)),
        num_speculative_tokens=data.draw(st.integers(1, 9)),
    )  # fmt: skip
    assert answers_of(tiny_model, drafter, overlaps=data.draw(st.booleans()), **config)[0] == plain[0]


@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}], ids=["", "chunked"])
def test_what_the_model_itself_guesses_is_right(tiny_model: Path, config: dict[str, Any]) -> None:
    engine = Engine(str(tiny_model), EngineConfig(**SMALL, **config))
    for tokens, blocks in ((64, None), (16, 8)):  # the second cache does not hold all three
        engine.drafter = Eager(tiny_model, tiny_model, tokens=tokens, blocks=blocks)
        for index in range(3):
            engine.submit(str(index), prompt(index, 40), GREEDY)
        while engine.has_work():
            engine.step()
            engine.check()
        stats = engine.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 20


def test_what_it_reads_is_found_again(tiny_model: Path) -> None:
    drafter = Eager(tiny_model, tiny_model)
    engine = Engine(str(tiny_model), EngineConfig(**SMALL))
    engine.drafter = drafter
    spans: list[Span] = []
    run = drafter.model.run
    drafter.model.run = lambda given: spans.extend(given) or run(given)  # type: ignore[method-assign, func-returns-value]
    for name in "ab":
        list(engine.generate([prompt(1, 64)], [GREEDY]))
        first = next(span for span in spans if span.name == "0#0")
        assert first.start == (0 if name == "a" else 64)
        spans.clear()


def drafter(target: Path, cost: float, step: Callable[[int], float] = lambda rows: 1 + 0.05 * rows) -> ModelDrafter:
    """One that drafts by the target itself, and knows that a ``step`` of so many rows takes so many seconds, and one of
    the draft model ``cost``, which its clock says too."""
    made = Eager(target, target)
    ticks = count()
    config = SpeculativeConfig("draft_model", model=str(target))
    fresh = ModelDrafter(made.model, config, 64, made.model.vocab_size, lambda: next(ticks) * cost)
    for rows in range(1, 65):
        for _ in range(4):
            fresh.timed(rows, step(rows))
            fresh._draft_costs.add(rows, cost)
    return fresh


def asked(name: str = "a", length: int = 8) -> Request:
    made = Request(name, tuple(prompt(3, length)), SamplingParams(max_tokens=460))
    made.output_token_ids.append(7)
    return made


def test_dear_guesses_are_few(tiny_model: Path) -> None:
    lengths = [len(drafter(tiny_model, cost).draft([asked()]).get("a", ())) for cost in (0.01, 0.1, 0.4, 2)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[1] > 0 == lengths[3]


def test_many_requests_get_no_drafts(tiny_model: Path) -> None:
    made = []
    for many in (1, 8):  # from eight rows on, a row costs as much as any other
        drafts = drafter(tiny_model, 0.05, lambda rows: max(1.0, rows / 8))
        made.append(sum(map(len, drafts.draft([asked(str(i)) for i in range(many)]).values())))
    assert made[0] > 0 == made[1]


def test_nothing_is_drafted_for_whom_it_is_wrong_until_it_would_be_right(tiny_model: Path) -> None:
    strange = [(step * 7) % 90 for step in range(80)]
    engine = Engine(str(tiny_model), EngineConfig(**SMALL))
    start = (*asked().prompt_token_ids, 7, *strange)
    (usual,) = [
        [token for output in engine.generate([list(start)], [replace(GREEDY, max_tokens=380)])
         for token in output.token_ids]
    ]  # fmt: skip
    drafts, request, made = drafter(tiny_model, 0.1), asked(), []
    for token in (*strange, *usual):
        made.append(len(drafts.draft([request]).get("a", ())))
        request.output_token_ids.append(token)
        drafts.timed(1, 1.05)
    assert sum(made[40:80]) < 10 and sum(made[-50:]) > 150, made


def test_a_long_prompt_is_read_where_the_answer_may_pay_for_it(tiny_model: Path) -> None:
    for most, read in ((160, True), (3, False)):
        drafts = drafter(tiny_model, 0.3)
        request = Request("a", tuple(prompt(3, 330)), SamplingParams(max_tokens=most))
        request.output_token_ids.append(7)
        found = [drafts.draft([request]).get("a", []) for _ in range(6)]  # a step of the draft model has 64 tokens
        assert not any(found[:5]) and bool(found[5]) is read


def test_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", ["<|more|>"])
    config = EngineConfig(**SMALL, speculative_config=SpeculativeConfig("draft_model", model=str(other)))
    with pytest.raises(UsageError, match=r"other has another vocabulary than tiny: token '!' is number 4 there and 3"):
        Engine(str(tiny_model), config)


def test_a_draft_model_that_does_not_fit_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.runtime.memory.available_memory", lambda: 1 << 20)
    config = EngineConfig(**SMALL, speculative_config=SpeculativeConfig("draft_model", model=str(tiny_model)))
    with pytest.raises(CapacityError, match=r"draft model tiny: the model does not fit: .* MiB weights"):
        Engine(str(tiny_model), config)


def test_tokens_that_the_draft_model_does_not_know_are_not_read(tiny_model: Path) -> None:
    drafts = Eager(tiny_model, tiny_model)
    drafts.model.vocab_size = 50
    request = asked()
    assert max(request.prompt_token_ids) >= 50 and not drafts.draft([request])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "draft_model"}, "need a model"), ({"method": "ngram", "model": "x"}, "no other method"),
     ({"model": 3}, "must be a text")],
)  # fmt: skip
def test_a_draft_model_has_a_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SpeculativeConfig.of(options)


def test_a_model_is_a_draft_model(tiny_model: Path) -> None:
    config = SpeculativeConfig.of({"model": str(tiny_model), "num_speculative_tokens": 4})
    engine = Engine(str(tiny_model), EngineConfig(**SMALL, speculative_config=config))
    assert isinstance(engine.drafter, ModelDrafter) and "draft model tiny: " in engine.notes[-1]
    assert engine.scheduler.config.logits_limit == 64
