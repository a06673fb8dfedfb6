"""``LLM`` takes what vLLM's published examples give it, answers in the same shape, and refuses the rest by name."""

from __future__ import annotations

from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.runtime.config import EngineConfig
from qserve.runtime.llm import LLM
from qserve.runtime.sampling import RequestError, SamplingParams
from qserve.runtime.vllm_arguments import NO_CHOICE, engine_config

SMALL = {"kv_cache_memory": 4 << 20, "threads": 1}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(model=str(tiny_model), **SMALL)


def test_the_arguments_of_vllm(tiny_model: Path) -> None:
    taken = LLM(
        model=str(tiny_model),
        tokenizer=str(tiny_model),
        tokenizer_mode="auto",
        trust_remote_code=False,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        dtype="float",
        quantization=None,
        revision=None,
        seed=0,
        swap_space=4,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_dtype="float16",
        kv_cache_memory_bytes=4 << 20,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).engine.config
    assert taken == EngineConfig(
        dtype="float32", seed=0, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_dtype="fp16",
        kv_cache_memory=4 << 20, enable_prefix_caching=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not served: a model runs on one GPU"),
        ({"data_parallel_size": True}, "data_parallel_size=True is not served"),
        ({"data_parallel_size": 4}, "data_parallel_size=4"),
        ({"pipeline_parallel_size": 4}, "--pipeline-parallel-size 4: .* has 2 layers"),
        ({"trust_remote_code": True}, "trust_remote_code=True is not served: code that comes with a model is never"),
        ({"speculative_config": {"method": "mtp"}}, "method 'mtp' of --speculative-config is not served"),
        ({"speculative_config": {"tokens": 5}}, "--speculative-config has no 'tokens': choose from method, "),
        ({"speculative_config": {"num_speculative_tokens": "5"}}, "num_speculative_tokens .* must be a whole number"),
        ({"speculative_config": {"num_speculative_tokens": 65}}, "num_speculative_tokens .* must be 1 to 64, not 65"),
        ({"speculative_config": {"prompt_lookup_min": 9}}, "prompt_lookup_min 9 .* exceeds prompt_lookup_max 8"),
        ({"tokenizer": "other/tokenizer"}, "tokenizer 'other/tokenizer' is not served"),
        ({"quantization": "awq"}, "--quantization awq: .* is not quantized"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization must be above 0"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization must be above 0"),
        ({"seed": 2**63}, "--seed"),
        ({"max_modellen": 5}, "unknown option 'max_modellen'; did you mean max_model_len?"),
        ({"zzz": 5}, "unknown option 'zzz'; the options are max_model_len, "),
    ],
)
def test_what_is_not_served_is_refused_by_name(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        LLM(str(tiny_model), **options)
    assert "\n" not in str(caught.value)


def test_no_argument_has_two_meanings() -> None:
    assert not NO_CHOICE.keys() & EngineConfig.__dataclass_fields__.keys()
    for name, argument in NO_CHOICE.items():
        for value in argument.values:
            assert engine_config({name: value}) == EngineConfig()
        assert argument.why or not argument.values, f"{name}: what to do instead?"


def test_a_quantized_checkpoint_by_its_format(tiny_packed: Path) -> None:
    for name in ("gptq", "gptq_marlin"):
        assert LLM(str(tiny_packed), quantization=name, **SMALL).generate("a", GREEDY)[0].finished
    with pytest.raises(UsageError, match="is stored as gptq; "):
        LLM(str(tiny_packed), quantization="awq", **SMALL)


def test_products_compute_in_what_the_kernels_have(tiny_model: Path) -> None:
    assert LLM(str(tiny_model), dtype="float32", kernels="reference", **SMALL)
    with pytest.raises(CapacityError, match="--dtype bfloat16: the reference kernels compute in float32 here"):
        LLM(str(tiny_model), dtype="bfloat16", kernels="reference", **SMALL)


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer()("the quick")["input_ids"]
    prompts = ["the quick", {"prompt": "the quick"}, {"prompt_token_ids": ids}, ids]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["the quick", "the quick", None, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    for single in prompts:
        (alone,) = llm.generate(single, sampling_params=GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    lengths = llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)])
    assert [len(output.outputs[0].token_ids) for output in lengths] == [2, 5]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {}}, "not multi_modal_data"),
        ({}, "not nothing"),
        ({"prompt_token_ids": [10**6]}, "outside"),
    ],
)
def test_prompts_of_other_kinds_are_refused(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate([prompt], GREEDY)
    assert caught.value.param == "prompt" and not llm.engine.has_work()
    with pytest.raises(RequestError, match="2 prompts but 1 sampling") as caught:
        llm.generate(["a", "b"], [GREEDY])
    assert caught.value.param == "sampling_params"


def test_outputs_have_the_shape_of_vllm(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=4, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(["the quick brown"], params)
    assert (output.request_id, output.prompt, output.finished) == ("0", "the quick brown", True)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]):
        assert found is not None and token in found and 2 <= len(found) <= 3
    for index, answer in enumerate(output.outputs):
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (index, "length", None)
        assert answer.finished() and answer.logprobs is not None and len(answer.logprobs) == 5
        own = [entry[token] for token, entry in zip(answer.token_ids, answer.logprobs)]
        assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in own))
        assert [sorted(each.rank for each in entry.values())[:3] for entry in answer.logprobs] == [[1, 2, 3]] * 5
        names = [each.decoded_token for each in own]
        assert [name in answer.text for name in names] == [not name.startswith("bytes:") for name in names]
    metrics = output.metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time < metrics.first_token_time <= metrics.finished_time
    plain = llm.generate("the quick brown", GREEDY)[0]
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None


def test_a_seed_of_the_engine_makes_draws_repeat(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qserve.runtime.engine.SystemRandom", SystemRandom)  # in CI there is one seed for all
    drawn = SamplingParams(n=2, max_tokens=8, ignore_eos=True, temperature=2.0)

    def draw(seed: int | None) -> list[list[int]]:
        llm = LLM(str(tiny_model), seed=seed, **SMALL)
        return [answer.token_ids for output in llm.generate(["a", "b"], drawn) for answer in output.outputs]

    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_embed(llm: LLM) -> None:
    first, second = llm.embed(["the quick", {"prompt_token_ids": [1, 2, 3]}])
    assert sum(value * value for value in first.outputs.embedding) == pytest.approx(1)
    assert len(first.outputs.embedding) == 64 and second.prompt_token_ids == [1, 2, 3]
    assert llm.embed("the quick")[0].outputs == first.outputs
    assert llm.embed("the quick", pooling="last")[0].outputs != first.outputs
    with pytest.raises(RequestError, match="pooling must be mean or last, not 'sum'"):
        llm.embed("a", pooling="sum")


USER = {"role": "user", "content": "hello"}


def test_chat(llm: LLM) -> None:
    answer = {"role": "assistant", "content": "hi"}
    conversations = [[{"role": "system", "content": "s"}, USER], [USER, answer, USER]]
    alone = llm.chat(conversations[0], GREEDY, use_tqdm=False)
    both = llm.chat(conversations, sampling_params=GREEDY)
    assert [len(alone), len(both)] == [1, 2]
    assert both[0].outputs == alone[0].outputs
    rendered = llm.get_tokenizer().apply_chat_template(conversations[1], tokenize=False, add_generation_prompt=True)
    assert both[1].prompt == rendered and rendered.count("hello") == 2
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert llm.chat([parts], GREEDY)[0].prompt == llm.chat([USER], GREEDY)[0].prompt
    (bare,) = llm.chat([USER], GREEDY, add_generation_prompt=False)
    assert bare.prompt is not None and (llm.chat([USER], GREEDY)[0].prompt or "").startswith(bare.prompt)
    (continued,) = llm.chat([USER, answer], GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt is not None and continued.prompt.endswith("hi")
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}"
    (own,) = llm.chat([USER], GREEDY, chat_template=template, chat_template_kwargs={"loud": True})
    assert own.prompt == "hello!"


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], {}, "messages"),
        ([[USER], []], {}, "messages"),
        ([{"role": "user"}], {}, "messages[0].content"),
        ([{"role": "judge", "content": "a"}], {}, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "messages[0].content"),
        ([USER], {"chat_template_kwargs": {"nothing": 1}}, "chat_template_kwargs.nothing"),
        ([USER], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ([USER], {"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_chats_that_are_refused(llm: LLM, messages: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY, **options)
    assert caught.value.param == param, str(caught.value)
