"""An EAGLE-3 head: it computes what was published, of the states of the right tokens, and changes no answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.source import open_model
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.runtime.blocks import BlockManager
from qserve.runtime.config import EngineConfig
from qserve.runtime.eagle3_drafter import Eagle3Drafter
from qserve.runtime.eagle3_head import Eagle3Head
from qserve.runtime.engine import Engine
from qserve.runtime.hidden_states import HiddenStates
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import DecoderLimits
from qserve.runtime.models.eagle3 import Eagle3Decoder
from qserve.runtime.models.eagle3_config import eagle3_config
from qserve.runtime.native_backend import NativeBackend
from qserve.runtime.request import Request
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.speculative_config import SpeculativeConfig
from tests.eagle3 import NaiveHead, save_head
from tests.runtime.test_drafts import GREEDY, Answers, answers_of, each_config, prompt

SMALL: dict[str, Any] = {"kv_cache_memory": 1 << 20, "threads": 1}
LIMITS = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=8)
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "residual": {"norm_before_residual": True}, "normed": {"norm_before_fc": True, "read": (1, 2)},
    "biased": {"bias": True, "drafts": 0}, "deep": {"layers": 2, "norm_before_residual": True},
    "qwen3": {"kind": "qwen3"}, "shared table": {"own_table": False}, "wider": {"width": 96},
}  # fmt: skip


@pytest.fixture(scope="module")
def vocab(tiny_model: Path) -> int:
    return int(json.loads((tiny_model / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def head(tiny_model: Path, vocab: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("heads") / "head", vocab=vocab)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> tuple[Answers, int]:
    answers, _, steps = answers_of(tiny_model)
    return answers, steps


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_was_published(
    tiny_model: Path, vocab: int, tmp_path: Path, case: str, kernels: str
) -> None:
    """In chunks, behind the states of a target and behind its own outputs."""
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    path = save_head(tmp_path / "head", **{"vocab": vocab, **CASES[case]})
    source, target = open_model(path), open_model(tiny_model)
    config = eagle3_config(source.config, "head", decoder_config(target.config, "tiny"))
    table = target.tensor("model.embed_tokens.weight") if case == "shared table" else None
    made = Eagle3Decoder(source, config, registry.make(kernels, 1), LIMITS, table, kv_dtype=torch.float32, int8=False)
    naive, read, done = NaiveHead(path, table), made.states.shape[1], 0
    states, tokens = torch.randn(20, read), torch.randint(0, vocab, (25,))
    want = [naive.row(int(token), naive.features(state)) for token, state in zip(tokens, states)]
    want += [naive.row(int(tokens[20]), want[-1])]
    want += [naive.row(int(tokens[21]), want[-1])]
    blocks, last = torch.tensor([[3, 1]], dtype=torch.int32), torch.empty(0)
    for count in (13, 1, 6, 1, 1):
        positions = torch.arange(done, done + count, dtype=torch.int32)
        slots = blocks[0][positions.long() // 16] * 16 + positions % 16
        start = torch.tensor([0, count], dtype=torch.int32)
        rows = torch.arange(count, dtype=torch.int32)
        step = Step(tokens[done : done + count].int(), positions, slots, start, blocks, rows)
        if done < 20:
            made.states[:count] = states[done : done + count]
            made.combine(step)
        else:
            made.features[0] = last
        made.run(step)
        made.head(step)
        last = made.x[count - 1].clone()
        expected = torch.stack(want[done : done + count])
        torch.testing.assert_close(made.x[:count], expected, rtol=1e-4, atol=1e-4)
        assert made.greedy[:count].tolist() == [int(naive.logits(x).argmax()) for x in expected]
        done += count


class Eager(Eagle3Drafter):
    """Believes that further rows and the head cost next to nothing; with a ``seed``, guesses at random whether guesses
    are right. Checks itself."""

    def __init__(
        self, target: Path, head: Path, *, blocks: int | None = None, seed: int | None = None, tokens: int = 64,
        **options: int,
    ) -> None:  # fmt: skip
        drafts = SpeculativeConfig("eagle3", model=str(head), **options)
        config = EngineConfig(**SMALL, max_num_seqs=16, max_num_batched_tokens=tokens, speculative_config=drafts)
        made = Eagle3Head.load_head(str(head), config, open_model(str(target)))
        if blocks is not None:
            made.blocks = BlockManager(blocks, 16, False)
            made.max_model_len = min(made.max_model_len, blocks * 16)
        super().__init__(made, drafts, 64, made.vocab_size)
        for rows in range(1, 65):
            for _ in range(4):
                super().timed(rows, 1 + rows / 1000)
        self._chance = None if seed is None else random.Random(seed)
        self.made: list[tuple[list[int], list[int]]] = []  # what was known, and the draft

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
        known = {each.request_id: [*each.prompt_token_ids, *each.output_token_ids] for each in requests}
        self.made += [(known[name], list(draft)) for name, draft in found.items()]
        return found


def served(head: Path, **config: Any) -> dict[str, Any]:
    """The options of an engine that gives out what ``head`` reads."""
    return {**config, "speculative_config": SpeculativeConfig("eagle3", model=str(head))}


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapped"])
@each_config
def test_nobodys_answer_changes(
    tiny_model: Path, head: Path, plain: tuple[Answers, int], overlaps: bool, config: dict[str, Any]
) -> None:
    drafter = Eager(tiny_model, head, seed=1, tokens=config.get("max_num_batched_tokens", 64))
    found, engine, _ = answers_of(tiny_model, drafter, overlaps=overlaps, **served(head, **config))
    assert found == plain[0] and engine.stats().num_draft_tokens > 50
    assert bool(engine.scheduler.num_preemptions) == ("kv_cache_memory" in config)


@pytest.mark.slow
def test_it_drafts_for_a_model_on_several_ranks(
    tiny_model: Path, head: Path, plain: tuple[Answers, int]
) -> None:
    """The rank that plans has all of the hidden states that the head reads, and computes it alone."""
    drafter = Eager(tiny_model, head, seed=1)
    found, engine, _ = answers_of(tiny_model, drafter, **served(head, tensor_parallel_size=2))
    assert found == plain[0] and engine.stats().num_draft_tokens > 50
    engine.close()


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_nobodys_answer_changes_whatever_room_and_trust_there_is(
    tiny_model: Path, head: Path, plain: tuple[Answers, int], data: st.DataObject
) -> None:
    seats = data.draw(st.integers(2, 16))
    config = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": data.draw(st.integers(seats, 80)),
        "kv_cache_memory": data.draw(st.integers(45_100, 200_000)),
        "enable_prefix_caching": data.draw(st.booleans()),
    }
    drafter = Eager(
        tiny_model, head, blocks=data.draw(st.integers(2, 40)), seed=data.draw(st.integers(0, 1 << 30)),
        tokens=data.draw(st.integers(16, 80)), num_speculative_tokens=data.draw(st.integers(1, 9)),
    )  # fmt: skip
    overlaps = data.draw(st.booleans())
    assert answers_of(tiny_model, drafter, overlaps=overlaps, **served(head, **config))[0] == plain[0]


def test_drafts_are_those_of_the_target_states(tiny_model: Path, head: Path) -> None:
    """Behind a prompt in two chunks, and behind the same again, most of which is in the prefix cache."""
    drafter, naive = Eager(tiny_model, head, num_speculative_tokens=3), NaiveHead(head)
    engine = Engine(str(tiny_model), EngineConfig(**SMALL, **served(head, max_num_batched_tokens=24, max_num_seqs=4)))
    engine.drafter = drafter
    text = prompt(3, 40)
    loaded = NativeBackend().load(open_model(tiny_model), EngineConfig(**SMALL), hidden_layers=(0, 1, 2))
    for begins in (0, 32):
        drafter.made.clear()
        list(engine.generate([text], [GREEDY]))
        assert len(drafter.made) > 5
        whole = max((known for known, _ in drafter.made), key=len)
        count = len(whole)
        rows = torch.arange(count, dtype=torch.int32)
        blocks = torch.arange(8, dtype=torch.int32)[None]
        step = Step(torch.tensor(whole, dtype=torch.int32), rows, rows, torch.tensor([0, count], dtype=torch.int32),
                    blocks, rows[:0])  # fmt: skip
        loaded.runner.decoder.run(step)  # type: ignore[attr-defined]
        states = torch.cat([each[:count] for each in loaded.runner.decoder.hidden], 1)  # type: ignore[attr-defined]
        same = total = 0
        for known, draft in drafter.made:
            assert known == whole[: len(known)]
            want = naive.drafts(states[begins : len(known) - 1], known[begins:], 3)
            same += sum(a == b for a, b in zip(draft, want))
            total += len(draft)
        assert same >= 0.8 * total > 10  # the head's weights are rounded


def test_who_comes_late_begins_at_the_states_that_wait(tiny_model: Path, head: Path) -> None:
    drafter = Eager(tiny_model, head, tokens=80, num_speculative_tokens=2)
    engine = Engine(str(tiny_model), EngineConfig(**SMALL, **served(head)))
    engine.drafter = drafter
    spans: list[Any] = []
    run = drafter.model.run

    def watched(given: Any) -> Any:
        spans.extend(given)
        return run(given)

    drafter.model.run = watched  # type: ignore[method-assign]
    list(engine.generate([prompt(1, 150)], [GREEDY]))
    assert (spans[0].start, len(spans[0].token_ids), spans[0].states.shape) == (0, 66, (66, 192))
    assert spans[1].start == 66 and spans[1].states is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 14)), max_size=25), st.integers(3, 9))
def test_the_newest_states_are_kept(added: list[tuple[int, int, int]], length: int) -> None:
    """Beside a dictionary that keeps all that is valid."""
    states = HiddenStates(3, length, 3)
    requests = [Request(str(i), (1,), SamplingParams()) for i in range(4)]
    all_of: dict[int, dict[int, float]] = {}
    for serial, (who, start, count) in enumerate(added):
        rows = torch.arange(count).float() + 100 * serial
        states.add([(None, 0, 2), (requests[who], start, count)],
                   [torch.cat([torch.full((2, 1), -1.0), rows[:, None]]), torch.ones(count + 2, 2)])  # fmt: skip
        kept = all_of.pop(who, {})
        begins = start - 1 in kept or start in kept
        kept = {position: value for position, value in kept.items() if begins and position < start}
        kept |= {start + i: float(rows[i]) for i in range(count)}
        all_of[who] = kept
        while len(all_of) > 3:
            del all_of[next(iter(all_of))]
        for i, request in enumerate(requests):
            known = states.known(request)
            assert len(known) <= length and set(known) <= all_of.get(i, {}).keys()
            if i == who:
                assert known.stop == start + count and len(known) >= min(count, length)
            if known:
                found = states.of(request, known.start, known.stop)
                assert found[:, 0].tolist() == [all_of[i][position] for position in known]
                assert bool((found[:, 1:] == 1).all())
    assert not states.known(Request("0", (1,), SamplingParams())), "another one of that name"


def test_heads_that_are_not_computed_are_refused(tiny_model: Path, vocab: int, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"speculators_model_type": "eagle"}, "is no EAGLE-3 head"),
        ({"read": (0, 2, 1)}, r"layers \[0, 2, 1\]: they must ascend and be among the target's, 0 to 2"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"layers \[2, 1, -1\]"),
        ({"vocab": vocab + 1}, "drafts for a vocabulary of"),
        ({"norm_output": True}, "has norm_output"),
        ({"kind": "gemma2"}, "a layer of type 'gemma2'"),
        ({"read": (0, 1), "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"fc.weight is \(64, 128\)"),
        ({"own_table": False, "width": 96}, "has no embed_tokens.weight"),
        ({"draft_vocab_size": 61}, "lm_head.weight is"),
    ]
    for number, (changes, message) in enumerate(cases):
        path = save_head(tmp_path / str(number), **{"vocab": vocab, **changes})
        config = EngineConfig(**SMALL, **served(path))
        with pytest.raises(CheckpointError, match=message):
            Engine(str(tiny_model), config)


def test_what_a_head_needs_is_said(tiny_model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="methods draft_model and eagle3 need a model"):
        SpeculativeConfig.of({"method": "eagle3"})
    with pytest.raises(UsageError, match="computed through transformers"):
        Engine(str(tiny_model), EngineConfig(**SMALL, **served(head, backend="transformers")))
    with pytest.raises(UsageError, match="computed on a CPU alone"):
        Engine(str(tiny_model), EngineConfig(**SMALL, **served(head, kernels="triton")))
    monkeypatch.setattr("qserve.runtime.eagle3_head.available_memory", lambda: 1 << 20)
    with pytest.raises(CapacityError, match=r"EAGLE-3 head head does not fit: .* hidden states"):
        Engine(str(tiny_model), EngineConfig(**SMALL, **served(head)))


def test_an_engine_takes_a_head(tiny_model: Path, head: Path) -> None:
    config = SpeculativeConfig.of({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    engine = Engine(str(tiny_model), EngineConfig(**SMALL, speculative_config=config))
    assert isinstance(engine.drafter, Eagle3Drafter) and engine.notes[-1].startswith("EAGLE-3 head head: ")
