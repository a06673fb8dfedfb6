"""Adapters in the engine: each request gets its own, whatever runs beside it, and they come and go under load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from transformers import AutoModelForCausalLM

from qserve import LLM, LoRARequest
from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.lora import read_adapter
from qserve.kernels import native
from qserve.kernels.ranks import RankLost
from qserve.kernels.triton.target import is_interpreted
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.lora_layers import LaidOut
from qserve.runtime.parallel.rank_adapters import RankAdapters
from qserve.runtime.sampling import RequestError, SamplingParams
from tests.adapters import write_adapter

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
LAYERS = range(2)
SHAPES = {
    f"model.layers.{i}.self_attn.{name}_proj": (64 if name in "qo" else 32, 64) for i in LAYERS for name in "qkvo"
}
SHAPES |= {f"model.layers.{i}.mlp.{name}_proj": (128, 64) for i in LAYERS for name in ("gate", "up")}
SHAPES |= {f"model.layers.{i}.mlp.down_proj": (64, 128) for i in LAYERS}
CONFIG: dict[str, Any] = {"kv_cache_memory": 4 << 20, "threads": 2, "max_num_seqs": 8, "max_lora_rank": 16}
PROMPTS = [
    [i * 7 % 250 + 3 for i in range(start, start + length)] for start, length in ((0, 40), (0, 40), (5, 3), (9, 21))
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    few = {name: shape for name, shape in SHAPES.items() if "q_proj" in name or "down" in name}
    return {
        "sql": str(write_adapter(folder / "sql", SHAPES, seed=1, size=0.2)),
        "law": str(write_adapter(folder / "law", few, seed=2, size=0.3, r=16, lora_alpha=9, dtype=torch.bfloat16)),
        "art": str(write_adapter(folder / "art", SHAPES, seed=3, size=0.1, r=3, use_rslora=True)),
    }


def logprobs(engine: Engine, prompt: list[int], adapter: str | None) -> torch.Tensor:
    """float32 [tokens, vocab], through the path that serves."""
    rows: list[torch.Tensor] = []
    engine.submit("x", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), adapter=adapter)
    engine._choices["x#0"].row_sink = lambda start, some: rows.append(some.clone())
    while engine.has_work():
        engine.step()
        engine.check()
    return torch.cat(rows)


def answers(engine: Engine, asked: Sequence[tuple[list[int], str | None]]) -> list[list[float]]:
    """The tokens of each prompt with its adapter, and their log-probabilities; in the end those of a request "old"
    that has begun before."""
    found: list[list[float]] = [[] for _ in (*asked, "old")]
    params = [SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)] * len(asked)
    for output in engine.generate([list(prompt) for prompt, _ in asked], params, [adapter for _, adapter in asked]):
        engine.check()
        chosen = [token.chosen.logprob for token in output.logprobs or ()]
        found[-1 if output.request_id == "old" else int(output.request_id)] += [*output.token_ids, *chosen]
    return found if found[-1] else found[:-1]


@pytest.mark.parametrize(("name", "kernels"), [
    ("sql", "native"), ("law", "native"), ("art", "native"),
    pytest.param("law", "triton", marks=pytest.mark.skipif(not is_interpreted(), reason="in float32 only there")),
])  # fmt: skip
def test_logits_are_those_of_the_merged_model(
    tiny_model: Path, paths: dict[str, str], name: str, kernels: str
) -> None:
    config = EngineConfig(**CONFIG, kernels=kernels, kv_cache_dtype="fp32", lora_modules=tuple(paths.items()))
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for module, weight in read_adapter(Path(paths[name]), SHAPES, max_rank=16).modules.items():
        model.get_submodule(module).weight.data += weight.delta()
    with torch.no_grad():
        want = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    found = logprobs(Engine(str(tiny_model), config), PROMPTS[0], name)
    torch.testing.assert_close(found, want[: len(found)], rtol=0, atol=1e-4)


def test_a_neighbour_with_another_adapter_changes_no_bit(tiny_packed: Path, paths: dict[str, str]) -> None:
    """The same tokens and log-probabilities alone and together, and without adapters those of an engine that has
    none. Prefixes that are equal but for the adapter are not shared."""
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, "sql", "law", "art")]
    engine = Engine(str(tiny_packed), EngineConfig(**CONFIG, lora_modules=tuple(paths.items())))
    together = answers(engine, asked)
    assert len({tuple(tokens) for tokens in together[:4]}) == 4
    assert answers(engine, asked) == together, "the prefix cache changed an answer"
    small = EngineConfig(**CONFIG | {"max_num_seqs": 3, "max_num_batched_tokens": 30, "kv_cache_memory": 28 << 10},
                         max_model_len=64, lora_modules=tuple(paths.items()))  # fmt: skip
    preempting = Engine(str(tiny_packed), small)
    assert answers(preempting, asked[::-1])[::-1] == together
    assert preempting.scheduler.num_preemptions
    without = Engine(str(tiny_packed), EngineConfig(**CONFIG, enable_prefix_caching=False))
    alone = Engine(
        str(tiny_packed), EngineConfig(**CONFIG, enable_prefix_caching=False, lora_modules=tuple(paths.items()))
    )
    for each, tokens in zip(asked, together):
        assert answers(alone if each[1] else without, [each]) == [tokens]


def test_prefixes_are_found_by_content(tiny_model: Path, paths: dict[str, str]) -> None:
    engine = Engine(str(tiny_model), EngineConfig(**CONFIG, lora_modules=(("a", paths["sql"]), ("b", paths["sql"]))))
    hits = []
    for adapter in (None, "a", "b", None):
        before = engine.scheduler.prefix_hits
        answers(engine, [(PROMPTS[0], adapter)])
        hits.append(engine.scheduler.prefix_hits - before)
    assert hits == [0, 0, 32, 32], "two names of one content share prefixes, and nothing else"


class Swaps(RuleBasedStateMachine):
    """Adapters are loaded, replaced and unloaded while requests run: each request ends with the tokens of the adapter
    that its name stood for when it began."""

    model: Path
    options: dict[str, Any]
    paths: dict[str, str]
    wanted: dict[tuple[str | None, int], list[int]]

    def __init__(self) -> None:
        super().__init__()
        config = {**CONFIG, "enable_lora": True, "max_loras": 2, **self.options}
        self.engine = Engine(str(self.model), EngineConfig(**config))
        self.pool, self.count = self.engine.adapters, 0
        self.content: dict[str, str] = {}
        self.live: dict[str, tuple[list[int], str | None, int]] = {}
        self.gone: list[str] = []

    @rule(name=st.sampled_from("xyz"), content=st.sampled_from(["sql", "law", "art"]), replace=st.booleans())
    def load(self, name: str, content: str, replace: bool) -> None:
        path = self.paths[content]
        taken, slots = name in self.content and not replace, len(self.pool._slots)
        try:
            self.pool.add(name, path, self.pool.read(path), replace=replace)
        except UsageError:
            assert taken
        except CapacityError:
            assert (len(self.content) == 2 and name not in self.content) or slots == 4
        else:
            assert not taken
            self.content[name] = content

    @rule(name=st.sampled_from("xyz"))
    def unload(self, name: str) -> None:
        if self.content.pop(name, None) is not None:
            self.pool.remove(name, lambda: self.gone.append(name))
        else:
            with pytest.raises(UsageError, match="no adapter"):
                self.pool.remove(name)

    @rule(name=st.sampled_from([None, "x", "y", "z"]), prompt=st.integers(0, 3), count=st.integers(1, 2))
    def submit(self, name: str | None, prompt: int, count: int) -> None:
        self.count += 1
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, n=count)
        if name is not None and name not in self.content:
            with pytest.raises(RequestError, match="no adapter"):
                self.engine.submit(str(self.count), PROMPTS[prompt], params, adapter=name)
            return
        self.engine.submit(str(self.count), PROMPTS[prompt], params, adapter=name)
        for index in range(count):
            self.live[f"{self.count}#{index}"] = [], name and self.content[name], prompt

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                tokens, content, prompt = self.live[key := f"{output.request_id}#{output.index}"]
                tokens += output.token_ids
                if output.finish_reason is not None:
                    assert tokens == self.wanted[content, prompt]
                    del self.live[key]

    @rule()
    def abort(self) -> None:
        if self.live:
            request_id = next(iter(self.live)).partition("#")[0]
            self.engine.abort(request_id)
            self.live = {key: held for key, held in self.live.items() if key.partition("#")[0] != request_id}

    @invariant()
    def holds(self) -> None:
        self.engine.check()
        assert {adapter.name for adapter in self.pool.loaded} == self.content.keys()

    def teardown(self) -> None:
        for name in list(self.content):
            self.unload(name)
        while self.engine.has_work():
            self.step(1)
            self.engine.check()
        assert not self.live, "a request was lost"
        assert not self.pool._slots, "a slot is held by nobody"
        self.engine.close()


@pytest.mark.parametrize("ranks", [
    {},
    pytest.param({"tensor_parallel_size": 2, "threads": 1}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2, "threads": 1}, marks=pytest.mark.slow),
])  # fmt: skip
def test_adapters_come_and_go_under_load(tiny_packed: Path, paths: dict[str, str], ranks: dict[str, Any]) -> None:
    engine = Engine(str(tiny_packed), EngineConfig(**CONFIG, lora_modules=tuple(paths.items())))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    Swaps.model, Swaps.options, Swaps.paths, Swaps.wanted = tiny_packed, ranks, paths, {}
    for content in (None, *paths):
        for number, prompt in enumerate(PROMPTS):
            tokens = [token for output in engine.generate([prompt], [params], [content]) for token in output.token_ids]
            Swaps.wanted[content, number] = tokens
    few = settings(max_examples=4 if ranks else 12, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Swaps, settings=settings(few, suppress_health_check=list(HealthCheck)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [
    {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
], ids=str)  # fmt: skip
def test_several_ranks_give_the_bits_of_one(
    tiny_packed: Path, paths: dict[str, str], tmp_path: Path, ranks: dict[str, Any]
) -> None:
    """Adapters that are there from the start, and one that comes in the place of another while requests run."""
    asked = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, "sql", "law", "art")]
    found = []
    for options in ({}, {**ranks, "threads": 1}):
        config = {**CONFIG, "lora_modules": tuple(paths.items()), "max_model_len": 256, **options}
        engine = Engine(str(tiny_packed), EngineConfig(**config))
        try:
            found.append([answers(engine, asked)])
            engine.submit("old", PROMPTS[0], SamplingParams(max_tokens=9, temperature=0.0, logprobs=0), adapter="law")
            engine.step()
            engine.adapters.read(paths["sql"])  # and nothing comes of it
            engine.adapters.add("law", paths["art"], engine.adapters.read(paths["art"]), replace=True)
            found[-1].append(answers(engine, [(PROMPTS[0], "law"), (PROMPTS[0], "art")]))
            engine.adapters.add("brief", paths["sql"], engine.adapters.read(paths["sql"]))
            engine.adapters.remove("brief")
            engine.adapters.remove("sql")
            found[-1].append(answers(engine, asked[:1]))
            last = engine.adapters.read(paths["law"])
            if isinstance(engine.adapters._layers, RankAdapters):
                assert [*engine.adapters._layers._layers.waiting.values()] == [LaidOut(last.sha256, last.matrices)]
                assert last.nbytes == engine.config.num_ranks * LaidOut(last.sha256, last.matrices).nbytes
            with pytest.raises(CheckpointError, match="is no directory"):
                engine.adapters.read(str(tmp_path / "none"))
        finally:
            engine.close()
    assert found[0] == found[1]
    _, (law, art, old), _ = found[0]
    assert law == art != old


@pytest.mark.slow
def test_files_that_change_while_ranks_read_them_are_refused(tiny_packed: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql", SHAPES, seed=1)
    config = EngineConfig(**CONFIG | {"threads": 1}, tensor_parallel_size=2, enable_lora=True)
    engine = Engine(str(tiny_packed), config)
    try:
        layers = engine.adapters._layers
        assert layers is not None
        before = read_adapter(path, layers.shapes, max_rank=16)
        write_adapter(path, SHAPES, seed=2)
        with pytest.raises(CheckpointError, match="sql was changed while it was read; load it again"):
            layers.lay_out(before)
        engine.adapters.add("sql", str(path), engine.adapters.read(str(path)))
        assert answers(engine, [(PROMPTS[2], "sql")]) != answers(engine, [(PROMPTS[2], None)])
    finally:
        engine.close()
    with pytest.raises(RankLost):
        layers.lay_out(before)


def test_an_llm_takes_a_request_in_vllms_shape(tiny_model: Path, paths: dict[str, str]) -> None:
    llm = LLM(str(tiny_model), enable_lora=True, max_loras=2, **CONFIG)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    sql, law = LoRARequest("sql", 1, paths["sql"]), LoRARequest("law", 2, paths["law"])
    found = llm.generate(["hello"] * 3, greedy, lora_request=[None, sql, law])
    assert len({tuple(each.outputs[0].token_ids) for each in found}) == 3
    again = llm.generate("hello", greedy, lora_request=law)
    assert again[0].outputs[0].token_ids == found[2].outputs[0].token_ids
    chat = [llm.chat([{"role": "user", "content": "hi"}], greedy, lora_request=each) for each in (None, sql)]
    assert chat[0][0].outputs[0].token_ids != chat[1][0].outputs[0].token_ids
    with pytest.raises(RequestError, match="loaded from another path"):
        llm.generate("hello", greedy, lora_request=LoRARequest("sql", 1, paths["law"]))
    with pytest.raises(CapacityError, match="2 adapters are loaded or still in use, of at most 2"):
        llm.generate("hello", greedy, lora_request=LoRARequest("art", 3, paths["art"]))
    assert LLM(str(tiny_model), lora_modules={"sql": paths["sql"]}, **CONFIG).engine.config.enable_lora


def test_what_serves_no_adapter_says_so(tiny_model: Path, paths: dict[str, str]) -> None:
    engine = Engine(str(tiny_model), EngineConfig(**CONFIG))
    with pytest.raises(UsageError, match="start the server with --enable-lora"):
        engine.adapters.read(paths["sql"])
    with pytest.raises(RequestError, match="no adapter 'sql' is loaded"):
        engine.submit("a", PROMPTS[0], SamplingParams(max_tokens=1), adapter="sql")
    with pytest.raises(UsageError, match="through transformers, where adapters are not served"):
        Engine(str(tiny_model), EngineConfig(backend="transformers", enable_lora=True, kv_cache_memory=4 << 20))
    with pytest.raises(CheckpointError, match="rank 16, the limit is 8; raise --max-lora-rank"):
        Engine(str(tiny_model), EngineConfig(**CONFIG | {"max_lora_rank": 8}, lora_modules=(("law", paths["law"]),)))
