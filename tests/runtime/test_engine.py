"""The real engine on a tiny model: a neighbour never changes your tokens, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.kernels import native
from qserve.runtime.backlog import QueueFullError
from qserve.runtime.bad_words import bad_word_tokens
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.llm import LLM
from qserve.runtime.sampling import RequestError, SamplingParams

needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


class Recorder:
    """Keeps the logits that each request was sampled from, and who was preempted."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rows: dict[str, list[torch.Tensor]] = {}
        self.preempted: set[str] = set()

    def run(self, plan: Any, sink: Any) -> Any:
        self.preempted |= set(plan.preempted)
        output = self.runner.run(plan, sink)
        for request_id, row in zip(output.request_ids, output.logits):
            self.rows.setdefault(request_id.split("#")[0], []).append(row.clone())
        return output


def make_engine(model: Path, **config: Any) -> tuple[Engine, Recorder]:
    engine = Engine(str(model), EngineConfig(**{"kv_cache_memory": 4 << 20, "threads": 2, **config}))
    recorder = Recorder(engine.runner)
    engine.runner = recorder
    return engine, recorder


def finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            tokens.setdefault(f"{output.request_id}/{output.index}", []).extend(output.token_ids)
        engine.check()
    assert engine.stats().kv_blocks_used == 0
    return tokens


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def tiny_gemma(tiny_model: Path) -> Path:
    """A layer with a window and one without, norms around sublayers, and the tokenizer of ``tiny_model``."""
    out = shutil.copytree(tiny_model, tiny_model.parent / "tiny-gemma")
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=21, max_position_embeddings=512, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=5.0, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    return out


@pytest.fixture(scope="session", params=["dense", "packed", "gemma"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tiny_packed: Path, tiny_gemma: Path) -> Path:
    return {"dense": tiny_model, "packed": tiny_packed, "gemma": tiny_gemma}[request.param]


@pytest.fixture(scope="session")
def alone(model: Path) -> torch.Tensor:
    """[20, vocab]: the logits of one request that has the engine to itself and is prefilled in one piece."""
    engine, recorder = make_engine(model)
    engine.submit("mine", prompt(0, 50), GREEDY)
    finish(engine)
    return torch.stack(recorder.rows["mine"])


@needs_native
@pytest.mark.parametrize("way", ["batched", "chunked", "preempted", "cached", "one thread", "chosen twice"])
def test_the_same_request_gives_the_same_bits(model: Path, alone: torch.Tensor, way: str) -> None:
    if way == "batched":
        engine, recorder = make_engine(model, max_num_batched_tokens=64, max_num_seqs=32)
        for i in range(16):
            engine.submit(f"other{i}", prompt(i + 1, 5 + 7 * i), SamplingParams(max_tokens=3 + i, seed=i))
        for _ in range(4):  # arrives among others that are already under way
            engine.step()
        engine.submit("mine", prompt(0, 50), GREEDY)
    elif way == "chunked":
        engine, recorder = make_engine(model, max_num_batched_tokens=7, max_num_seqs=7)
        engine.submit("mine", prompt(0, 50), GREEDY)
    elif way == "preempted":
        engine, recorder = make_engine(model, kv_cache_memory=13 * 16 * 256, max_model_len=96)
        for i in range(3):
            longer = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            engine.submit(f"other{i}", prompt(i + 1, 30), longer)
        engine.submit("mine", prompt(0, 50), GREEDY)
    elif way == "cached":
        engine, recorder = make_engine(model)
        engine.submit("first", prompt(0, 50), GREEDY)
        finish(engine)
        engine.submit("mine", prompt(0, 50), GREEDY)
    elif way == "one thread":
        engine, recorder = make_engine(model, threads=1)
        engine.submit("mine", prompt(0, 50), GREEDY)
    else:
        engine, recorder = make_engine(model)
        both = SamplingParams(n=2, max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.submit("two", prompt(0, 50), both)
        tokens = finish(engine)
        assert tokens["two/0"] == tokens["two/1"] == alone.argmax(-1).tolist()
        return
    finish(engine)
    if way == "preempted":
        assert "mine#0" in recorder.preempted
    if way == "cached":
        assert engine.stats().prefix_hits >= 48
    assert torch.equal(torch.stack(recorder.rows["mine"]), alone)


@needs_native
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_company_changes_no_bit(model: Path, alone: torch.Tensor, data: st.DataObject) -> None:
    budget = data.draw(st.integers(8, 80), "token budget")
    others = data.draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 12)), max_size=8))
    engine, recorder = make_engine(model, max_num_batched_tokens=budget, max_num_seqs=8, kv_cache_memory=30 * 16 * 256)
    mine_at = data.draw(st.integers(0, 12), "arrival")
    for step in range(14):
        for i, (length, outputs, at) in enumerate(others):
            if at == step:
                shared = prompt(0, 50)[: length // 2] if i % 2 else []
                engine.submit(f"o{i}", [*shared, *prompt(i + 1, length)], SamplingParams(max_tokens=outputs, seed=i))
        if step == mine_at:
            engine.submit("mine", prompt(0, 50), GREEDY)
        engine.step()
        engine.check()
    finish(engine)
    assert torch.equal(torch.stack(recorder.rows["mine"]), alone)


@needs_native
@pytest.mark.parametrize("more", [{}, {"allowed_token_ids": range(9, 90), "bad_words": ["a", "the fox"]}], ids=str)
def test_seeded_sampling_does_not_depend_on_load(model: Path, more: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=12, seed=5, temperature=0.9, top_p=0.95, ignore_eos=True, **more)
    engine, _ = make_engine(model)
    engine.submit("mine", prompt(0, 20), params)
    alone = finish(engine)["mine/0"]
    for i in range(6):
        engine.submit(f"o{i}", prompt(i, 33), SamplingParams(max_tokens=9))
    engine.submit("mine", prompt(0, 20), params)
    assert finish(engine)["mine/0"] == alone
    engine.submit("mine", prompt(0, 20), SamplingParams(max_tokens=12, seed=6, temperature=0.9, ignore_eos=True))
    assert finish(engine)["mine/0"] != alone


def test_scores_are_log_probabilities_and_agree_with_decoding(model: Path) -> None:
    engine, recorder = make_engine(model, max_num_batched_tokens=16, max_num_seqs=16)
    tokens = prompt(0, 50)
    parts = list(engine.score(tokens))
    assert [start for start, _ in parts] == [0, 16, 32, 48]
    rows = torch.cat([part for _, part in parts])
    assert rows.shape == (50, engine.vocab_size)
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(50))
    torch.testing.assert_close(rows[-1], recorder.rows["score"][0].log_softmax(-1), rtol=1e-5, atol=1e-5)
    assert not engine.has_work() and engine.stats().kv_blocks_used == 0
    next(iter(engine.score(tokens)))  # left half way: nothing stays behind


def test_prompt_logprobs_are_those_of_transformers(tiny_model: Path) -> None:
    engine, _ = make_engine(tiny_model, max_num_batched_tokens=16, max_num_seqs=16, kv_cache_dtype="fp32")
    tokens = prompt(3, 40)
    engine.submit("r", tokens, SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    found = outputs[0].prompt_logprobs
    assert found is not None and all(output.prompt_logprobs is None for output in outputs[1:])
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert [t.chosen.token_id for t in found] == tokens[1:]
    for position, token in enumerate(found):
        assert token.chosen.logprob == pytest.approx(float(want[position, tokens[position + 1]]), abs=1e-3)
        assert [t.token_id for t in token.top] == want[position].topk(2).indices.tolist()


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_choices_share_the_log_probabilities_of_their_prompt(tiny_model: Path, max_tokens: int) -> None:
    engine, _ = make_engine(tiny_model, max_num_batched_tokens=16, max_num_seqs=16)
    params = SamplingParams(n=8, max_tokens=max_tokens, ignore_eos=True, seed=1)
    engine.submit("r", prompt(3, 40), replace(params, prompt_logprobs=2))
    scored, tokens, opened = [], {}, set()
    while engine.has_work():
        for output in engine.step():
            scored += [output.index for _ in output.prompt_logprobs or ()]
            opened.add(output.index)
            assert 0 in opened, "the first choice comes first"
            tokens.setdefault(f"r/{output.index}", []).extend(output.token_ids)
    assert scored == [0] * 39
    assert engine.journal.prompt_tokens <= 40 + 7 * 16, "at most a block for each further choice"
    engine.submit("r", prompt(3, 40), params)
    assert finish(engine) == tokens


def test_stop_strings_and_lengths(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20))
    free = llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))[0].outputs[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 30
    stop = free.text[4:7]
    cut = llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.0, stop=(stop,)))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[: free.text.index(stop)], "stop", stop)
    token = free.token_ids[3]
    first = free.token_ids.index(token)
    ended = llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(token,)))[0].outputs[0]
    assert ended.token_ids == free.token_ids[: first + 1] and ended.stop_reason == token
    later = SamplingParams(max_tokens=30, min_tokens=first + 1, temperature=0.0, stop_token_ids=(token,))
    assert len(llm.generate("hello", later)[0].outputs[0].token_ids) > first + 1


def test_a_stop_token_is_shown_only_if_asked_for(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20))
    stop = llm.engine.encode("q")
    params = SamplingParams(temperature=0.0, logit_bias={stop[0]: 100}, stop_token_ids=stop)
    for include, text in ((False, ""), (True, "q")):
        answer = llm.generate("the", replace(params, include_stop_str_in_output=include))[0].outputs[0]
        assert (answer.text, answer.token_ids, answer.stop_reason) == (text, stop, stop[0])


def test_special_tokens_are_shown_if_asked_for(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20))
    start = llm.engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    params = SamplingParams(temperature=0.0, logit_bias={start: 100}, max_tokens=3)
    assert llm.generate("the", params)[0].outputs[0].text == ""
    shown = llm.generate("the", replace(params, skip_special_tokens=False, stop=["start|><"]))[0].outputs[0]
    assert (shown.text, shown.stop_reason) == ("<|im_", "start|><")


def test_bad_words_are_those_that_the_tokenizer_spells(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20))
    spelled = [tuple(llm.engine.encode(text)) for text in ("quick", " quick")]
    assert bad_word_tokens(llm.engine.tokenizer, ["quick", " quick"]) == tuple(spelled) and len(spelled[0]) > 1
    likely = {token: 100.0 - place for place, token in enumerate(dict.fromkeys(spelled[0]))}
    for word, allowed in (("fox", True), ("quick", False)):
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, temperature=50.0, logit_bias=likely,
                                allowed_token_ids=sorted(likely), bad_words=[word])  # fmt: skip
        found = llm.generate(["the"] * 20, [replace(params, seed=seed) for seed in range(20)])
        texts = "|".join(each.outputs[0].text for each in found)
        assert ("quick" in texts) == allowed
    impossible = replace(params, bad_words=["q"], allowed_token_ids=llm.engine.encode("q"))
    ended = llm.generate("the", impossible)[0].outputs[0]
    assert ended.finish_reason == "error" and "bad_words leaves no token" in str(ended.error)
    assert llm.generate("the", GREEDY)[0].outputs[0].finish_reason == "length"


def test_the_end_of_a_prompt_is_kept(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, max_model_len=64))
    long = prompt(0, 500)
    for asked, kept in ((7, 7), (-1, 64 - 20), (64 - 20, 64 - 20)):
        answer, same = llm.generate([long, long[-kept:]], [replace(GREEDY, truncate_prompt_tokens=asked), GREEDY])
        assert answer.prompt_token_ids == same.prompt_token_ids == long[-kept:]
        assert answer.outputs[0].token_ids == same.outputs[0].token_ids
    messages = [{"role": "user", "content": "the quick brown fox " * 60}]
    cut = llm.chat(messages, replace(GREEDY, truncate_prompt_tokens=9))[0]
    assert cut.prompt is not None and cut.prompt.endswith("<|im_start|>assistant\n") and len(cut.prompt_token_ids) == 9


def test_llm_keeps_the_order_and_batches_more_than_fits(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, max_waiting=4, max_num_seqs=3))
    prompts = [prompt(i, 4 + i) for i in range(11)]
    params = [SamplingParams(max_tokens=2 + i % 5, temperature=0.0, ignore_eos=True) for i in range(11)]
    answers = llm.generate(prompts, params)
    assert [a.prompt_token_ids for a in answers] == prompts
    assert [len(a.outputs[0].token_ids) for a in answers] == [2 + i % 5 for i in range(11)]
    for i in range(3):
        alone = llm.generate([prompts[i]], params[i])[0]
        assert alone.outputs[0].token_ids == answers[i].outputs[0].token_ids


def test_what_can_never_run_is_refused_by_field(tiny_model: Path) -> None:
    engine, _ = make_engine(tiny_model, max_model_len=64, kv_cache_memory=4 * 16 * 256, max_waiting=2)
    for tokens, params, field in (
        ([], GREEDY, "prompt"),
        ([10**6], GREEDY, "prompt"),
        ([3, -1], GREEDY, "prompt"),
        ([3, 4.0], GREEDY, "prompt"),
        (prompt(0, 65), GREEDY, "prompt"),
        (prompt(0, 60), SamplingParams(max_tokens=5), "max_tokens"),
        (prompt(0, 4), SamplingParams(allowed_token_ids=(3, 10**6)), "allowed_token_ids"),
        (prompt(0, 4), SamplingParams(allowed_token_ids=[*engine.eos_token_ids], min_tokens=1), "allowed_token_ids"),
        (prompt(0, 4), SamplingParams(truncate_prompt_tokens=65), "truncate_prompt_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit("r", tokens, params)
        assert caught.value.param == field
    engine.submit("a", prompt(0, 64), SamplingParams(max_tokens=1))
    engine.submit("b", prompt(0, 60), SamplingParams(max_tokens=4, ignore_eos=True))
    with pytest.raises(QueueFullError):
        engine.submit("c", prompt(0, 4), GREEDY)
    assert {key: len(tokens) for key, tokens in finish(engine).items()} == {"a/0": 1, "b/0": 4}


def test_nan_logits_fail_the_request_and_not_the_engine(tiny_model: Path) -> None:
    engine, recorder = make_engine(tiny_model)

    class Poison:
        def run(self, plan: Any, sink: Any) -> Any:
            output = recorder.run(plan, sink)
            for i, request_id in enumerate(output.request_ids):
                if request_id.startswith("bad"):
                    output.greedy[i] = -1
            return output

    engine.runner = Poison()
    engine.submit("bad", prompt(0, 9), GREEDY)
    engine.submit("good", prompt(1, 9), GREEDY)
    ends = {}
    while engine.has_work():
        ends.update({o.request_id: (o.finish_reason, o.error) for o in engine.step() if o.finish_reason})
        engine.check()
    assert ends["good"] == ("length", None)
    assert ends["bad"][0] == "error" and "NaN" in str(ends["bad"][1])
    assert engine.stats().kv_blocks_used == 0


def test_abort_frees_everything_at_once(tiny_model: Path) -> None:
    engine, _ = make_engine(tiny_model)
    engine.submit("a", prompt(0, 40), SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    engine.submit("b", prompt(1, 40), SamplingParams(n=2, max_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine.stats().kv_blocks_used > 0
    engine.abort("a")
    engine.check()
    assert engine.scheduler.request_ids() == {"b#0", "b#1"}
    engine.abort("nobody")
    engine.abort("b")
    engine.check()
    assert not engine.has_work() and engine.stats().kv_blocks_used == 0 and engine.step() == []


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"kv_cache_memory": 100}, CapacityError, "KV cache of 0 blocks"),
        ({"kv_cache_memory": 1 << 60}, CapacityError, "exceeds"),
        ({"max_model_len": 4096}, CapacityError, "context of 512"),
        ({"max_model_len": 512, "kv_cache_memory": 16 * 256}, CapacityError, "raise --kv-cache-memory"),
        ({"kernels": "cuda"}, UsageError, "choose from"),
        ({"kv_cache_dtype": "fp4"}, UsageError, "choose from"),
        ({"threads": 0}, UsageError, "at least 1"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, UsageError, "below"),
    ],
)
def test_options_that_cannot_be_had_are_refused(
    tiny_model: Path, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_engine(tiny_model, **config)


def test_a_step_is_as_large_as_suits_where_it_is_computed(tiny_model: Path) -> None:
    assert [EngineConfig().step_tokens(on_gpu) for on_gpu in (False, True)] == [512, 2048]
    assert [EngineConfig(max_num_seqs=600).step_tokens(on_gpu) for on_gpu in (False, True)] == [600, 2048]
    assert EngineConfig(max_num_seqs=8, max_num_batched_tokens=8).step_tokens(True) == 8
    engine, _ = make_engine(tiny_model)
    assert engine.scheduler.config.max_num_batched_tokens == 512


def test_a_missing_model_is_one_line() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Engine("/nowhere/at/all")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_engine_goes_on_after_an_error_in_a_step(tiny_model: Path, error: type[BaseException]) -> None:
    engine, recorder = make_engine(tiny_model)

    class Broken:
        def run(self, plan: Any, sink: Any) -> Any:
            raise error

    engine.submit("a", prompt(0, 9), GREEDY)
    engine.step()
    engine.runner = Broken()
    with pytest.raises(error):
        engine.step()
    engine.check()
    assert not engine.has_work() and engine.stats().kv_blocks_used == 0
    engine.runner = recorder
    engine.submit("a", prompt(0, 9), GREEDY)
    assert len(finish(engine)["a/0"]) == 20


def test_extreme_penalties_and_temperatures_draw_a_token(tiny_model: Path) -> None:
    engine, _ = make_engine(tiny_model)
    for i, (penalty, temperature) in enumerate(((0.01, 1e-5), (10.0, 100.0), (0.01, 1.0))):
        params = SamplingParams(
            max_tokens=5, repetition_penalty=penalty, temperature=temperature, top_p=0.9, min_p=0.1, ignore_eos=True
        )
        engine.submit(str(i), prompt(i, 9), params)
    assert all(len(tokens) == 5 for tokens in finish(engine).values())


def test_more_choices_than_may_ever_wait_are_refused(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20, max_waiting=1))
    with pytest.raises(RequestError) as caught:
        llm.generate("a", SamplingParams(n=2))
    assert caught.value.param == "n"
    with pytest.raises(RequestError):
        llm.generate(["a"], [])


def test_a_request_id_is_in_use_until_its_last_choice_ends(tiny_model: Path) -> None:
    engine, _ = make_engine(tiny_model)
    engine.submit("a", prompt(0, 9), SamplingParams(n=2, max_tokens=9, ignore_eos=True))
    engine._end("a#0", "stop")
    with pytest.raises(RequestError, match="in use"):
        engine.submit("a", prompt(0, 9), GREEDY)
    engine.check()
    finish(engine)


def test_stop_strings_wait_for_min_tokens(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), EngineConfig(kv_cache_memory=4 << 20))
    free = llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))[0].outputs[0]
    stop = SamplingParams(max_tokens=30, min_tokens=15, temperature=0.0, ignore_eos=True, stop=(free.text[4:6],))
    assert len(llm.generate("hello", stop)[0].outputs[0].token_ids) >= 15


@needs_native
def test_each_of_many_deadlines_is_kept_in_any_order(tiny_model: Path) -> None:
    now = 0.0
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=16, kv_cache_memory=4 << 20, threads=2)
    engine = Engine(str(tiny_model), config, clock=lambda: now)
    long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    timeouts = {"c": 6.0, "a": 2.0, "never": None, "b": 4.0, "gone": 1.0}
    for name, timeout in timeouts.items():
        engine.submit(name, prompt(0, 20), replace(long, timeout=timeout))
    engine.abort("gone")  # the nearest deadline is nobody's any more
    ended: dict[str, float] = {}
    while now < 8.0:
        ended |= {output.request_id: now for output in engine.step() if output.finish_reason == "timeout"}
        engine.check()
        if now == 3.0:
            engine.submit("gone", prompt(0, 20), replace(long, timeout=2.0))  # the name again, later
        now += 0.5
    assert ended == {"a": 2.0, "b": 4.0, "gone": 5.0, "c": 6.0}
    engine.abort("never")


@needs_native
def test_a_deadline_ends_what_waits_and_what_runs(tiny_model: Path) -> None:
    now = 0.0
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory=4 << 20, threads=2)
    engine = Engine(str(tiny_model), config, clock=lambda: now)
    free = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    hurried = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, timeout=2.0)
    engine.submit("free", prompt(0, 20), free)
    engine.submit("runs", prompt(1, 20), hurried)
    engine.submit("waits", prompt(2, 20), replace(hurried, n=2))
    ended: list[tuple[str, int, str | None]] = []
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids if output.request_id == "free" else []
            if output.finish_reason is not None:
                ended.append((output.request_id, output.index, output.finish_reason))
                assert output.error is None or "timeout of 2 s" in output.error
        engine.check()
        now += 0.25
    late = [("runs", 0, "timeout"), ("waits", 0, "timeout"), ("waits", 1, "timeout")]
    assert ended == [*late, ("free", 0, "length")]
    assert engine.stats().kv_blocks_used == 0
    engine.submit("alone", prompt(0, 20), free)
    assert finish(engine)["alone/0"] == tokens
