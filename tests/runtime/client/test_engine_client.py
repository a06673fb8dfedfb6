"""An engine behind messages: its outputs arrive unchanged, and every choice ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.backlog import QueueFullError
from qserve.runtime.client import engine_client
from qserve.runtime.client.codec import decode, encode
from qserve.runtime.client.engine_client import EngineClient
from qserve.runtime.client.failures import EngineFailure
from qserve.runtime.client.generation import Generation, Observer
from qserve.runtime.client.messages import Command, Event
from qserve.runtime.client.thread_host import ThreadHost
from qserve.runtime.client.timeline import Timeline
from qserve.runtime.config import EngineConfig
from qserve.runtime.constraint import Constraint
from qserve.runtime.engine import Engine
from qserve.runtime.output import RequestOutput
from qserve.runtime.sampling import RequestError, SamplingParams
from tests.adapters import write_adapter

PROMPTS = [[5, 6, 7], [8, 9]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class CopyingHost(ThreadHost):
    """Hands over copies read from bytes, as a host does whose engine is elsewhere."""

    def start(self, receive: Callable[[Sequence[Event]], None]) -> None:
        super().start(lambda events: receive([decode(encode(event)) for event in events]))

    def send(self, command: Command) -> None:
        super().send(decode(encode(command)))


class Counts(Observer):
    def __init__(self) -> None:
        self.ended = self.aborted = self.failed = self.not_taken = 0

    def output(self, timeline: Timeline, output: RequestOutput, now: float) -> None:
        super().output(timeline, output, now)
        self.ended += output.finish_reason is not None

    def dropped(self, choices: int, reason: str) -> None:
        self.aborted += choices if reason == "abort" else 0
        self.failed += choices if reason == "error" else 0

    def refused(self, choices: int) -> None:
        self.not_taken += choices

    @property
    def all(self) -> tuple[int, int, int, int]:
        return self.ended, self.aborted, self.failed, self.not_taken


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(str(tiny_model), EngineConfig(max_model_len=256, kv_cache_memory=16 << 20, max_waiting=8))


@pytest.fixture
def client(engine: Engine) -> Iterator[EngineClient]:
    client = EngineClient(CopyingHost(engine))
    client.start()
    yield client
    client.stop()
    assert not client.alive and client.failure is None
    engine.check()
    assert engine.stats().kv_blocks_used == 0


async def texts(generation: Generation) -> dict[int, tuple[str, list[int]]]:
    found: dict[int, tuple[str, list[int]]] = {}
    async for choice, output in generation:
        text, tokens = found.get(choice, ("", []))
        found[choice] = text + output.text, tokens + output.token_ids
    return found


def test_outputs_are_those_of_the_engine(engine: Engine, client: EngineClient) -> None:
    expected: dict[int, list[int]] = {0: [], 1: []}
    for output in Engine(engine.source, engine.config).generate([*PROMPTS], [GREEDY, GREEDY]):
        expected[int(output.request_id)] += output.token_ids

    async def ask() -> dict[int, tuple[str, list[int]]]:
        return await texts(await client.submit(PROMPTS, GREEDY))

    found = asyncio.run(ask())
    assert {choice: tokens for choice, (_, tokens) in found.items()} == expected


def test_choices_logprobs_and_a_grammar_pass_through(client: EngineClient) -> None:
    choice = Constraint("choice", '["one", "two"]')
    params = SamplingParams(n=3, max_tokens=8, seed=1, logprobs=2, constraint=choice)

    async def ask() -> list[RequestOutput]:
        return [output async for _, output in await client.submit(PROMPTS[:1], params)]

    outputs = asyncio.run(ask())
    whole = {index: "".join(o.text for o in outputs if o.index == index) for index in range(3)}
    assert set(whole.values()) <= {"one", "two"} and len(whole) == 3
    assert all(len(token.top) == 2 for output in outputs for token in output.logprobs or ())


def test_refusals_keep_their_kind_and_field(client: EngineClient) -> None:
    async def ask(prompts: list[list[int]], params: SamplingParams) -> tuple[BaseException, Counts]:
        counts = Counts()
        with pytest.raises(RequestError) as caught:
            await client.submit(prompts, params, observer=counts)
        return caught.value, counts

    error, counts = asyncio.run(ask([[10**6]], GREEDY))
    assert type(error) is RequestError and error.param == "prompt" and counts.all == (0, 0, 0, 1)
    error, _ = asyncio.run(ask([[1]], SamplingParams(constraint=Constraint("regex", "(", "guided_regex"))))
    assert error.param == "guided_regex"
    error, counts = asyncio.run(ask([[1]] * 30, GREEDY))
    assert type(error) is QueueFullError and counts.all == (0, 0, 0, 30)
    assert client.num_arriving == 0


def test_a_request_that_fails_half_queued_leaves_nothing(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.scheduler.add

    def second_choice_fails(request: Any) -> None:
        if request.parent:
            raise QueueFullError("no room")
        add(request)

    monkeypatch.setattr(engine.scheduler, "add", second_choice_fails)

    async def ask() -> None:
        with pytest.raises(QueueFullError):
            await client.submit(PROMPTS, SamplingParams(n=2))

    asyncio.run(ask())
    assert not engine.scheduler.request_ids()


def test_every_choice_ends_once(client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [Counts() for _ in range(4)]
    params = SamplingParams(n=2, max_tokens=200, ignore_eos=True)
    run, broken = engine.runner.run, False

    def sometimes(*arguments: Any) -> Any:
        if broken:
            raise ValueError("a broken kernel")
        return run(*arguments)

    monkeypatch.setattr(engine.runner, "run", sometimes)

    async def ask() -> None:
        nonlocal broken
        left = await client.submit(PROMPTS, params, observer=counts[0])
        await anext(aiter(left))
        client.abort(left)
        client.abort(left)
        hurried = asyncio.create_task(client.submit(PROMPTS, params, observer=counts[1]))
        await asyncio.sleep(0)
        hurried.cancel()
        await asyncio.gather(hurried, return_exceptions=True)
        whole = await client.submit(PROMPTS[:1], GREEDY, observer=counts[2])
        assert len((await texts(whole))[0][1]) == 12
        failing = await client.submit(PROMPTS, params, observer=counts[3])
        broken = True
        with pytest.raises(EngineFailure, match="the engine failed"):
            await texts(failing)
        broken = False
        assert len(await texts(await client.submit(PROMPTS, GREEDY))) == 2, "it goes on"

    asyncio.run(ask())
    assert [each.all for each in counts] == [(0, 4, 0, 0), (0, 4, 0, 0), (1, 0, 0, 0), (0, 0, 4, 0)]


@pytest.mark.parametrize("logprobs", [None, 20])
def test_what_nobody_reads_is_bounded(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, logprobs: int | None
) -> None:
    """30 may wait, and the step that exceeds them. An output counts 1, with its log-probabilities 22. The second choice
    begins a step after the first."""
    monkeypatch.setattr(engine_client, "MAX_UNREAD", 30)
    counts, params = Counts(), SamplingParams(n=2, temperature=0.0, max_tokens=200, ignore_eos=True, logprobs=logprobs)

    async def ask() -> tuple[int, Generation]:
        unread = await client.submit(PROMPTS[:1], params, observer=counts)
        while counts.all == (0, 0, 0, 0):  # meanwhile others are read
            assert len((await texts(await client.submit(PROMPTS[1:], GREEDY)))[0][1]) == 12
        read = 0
        with pytest.raises(EngineFailure, match="is not read as fast"):
            async for _ in unread:
                read += 1
        return read, unread

    read, unread = asyncio.run(ask())
    assert counts.all == (0, 2, 0, 0) and unread.unread == 0
    assert read == (3 if logprobs else 31)


class Panic(BaseException):
    """As pyo3 raises one: no ``Exception``."""


def test_a_panic_in_a_step_ends_the_requests_and_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*arguments: Any) -> Any:
        raise Panic

    client, counts = EngineClient(CopyingHost(engine)), Counts()
    client.start()
    monkeypatch.setattr(engine.runner, "run", panic)

    async def ask() -> None:
        with pytest.raises(EngineFailure):
            async with asyncio.timeout(20):
                await texts(await client.submit(PROMPTS, GREEDY, observer=counts))

    asyncio.run(ask())
    assert counts.failed == 2 and not client.alive and client.failure == "the engine cannot go on: Panic"
    client.stop()
    engine.check()


def test_a_panic_in_a_grammar_refuses_its_request(
    client: EngineClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*arguments: Any) -> Any:
        raise Panic

    monkeypatch.setattr(engine.grammars, "matcher", panic)

    async def ask() -> None:
        with pytest.raises(EngineFailure, match="its log says why"):
            async with asyncio.timeout(20):
                await client.submit(PROMPTS, SamplingParams(constraint=Constraint("regex", "a", "guided_regex")))
        assert len(await texts(await client.submit(PROMPTS, GREEDY))) == 2, "it goes on"

    asyncio.run(ask())


def test_a_snapshot_and_the_stats_are_of_now(client: EngineClient) -> None:
    async def ask() -> None:
        generation = await client.submit(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(aiter(generation))
        snapshot = await client.snapshot()
        assert {request.request_id.partition("#")[0] for request in snapshot.running} == set(generation.request_ids)
        assert client.stats.num_running == 2 and client.stats.kv_blocks_used > 0
        client.abort(generation)
        assert (await client.snapshot()).running == ()
        assert client.stats.num_running == 0

    asyncio.run(ask())


def test_a_client_that_gives_up_ends_everything(engine: Engine) -> None:
    client, counts = EngineClient(CopyingHost(engine)), Counts()
    client.start()

    async def ask() -> None:
        generation = await client.submit(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True), observer=counts)
        client.give_up("no reason")
        with pytest.raises(EngineFailure, match="stuck"):
            await texts(generation)
        with pytest.raises(EngineFailure):
            await client.submit(PROMPTS, GREEDY)
        with pytest.raises(EngineFailure):
            await client.snapshot()

    asyncio.run(ask())
    assert counts.failed == 2 and client.failure == "no reason" and not client.alive
    client.stop()
    engine.check()


def test_adapters_come_and_go_as_messages(tiny_model: Path, tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "sql", {"model.layers.0.mlp.up_proj": (128, 64)}, size=0.5))
    config = EngineConfig(max_model_len=256, kv_cache_memory=4 << 20, lora_modules=(("first", path),))
    client = EngineClient(CopyingHost(engine := Engine(str(tiny_model), config)))
    client.start()

    async def ask() -> None:
        assert list(client.adapters) == ["first"]
        await client.load_adapter("sql", path)
        assert client.adapters["sql"].sha256 == client.adapters["first"].sha256
        constrained = replace(GREEDY, constraint=Constraint("regex", "[a-z]{30}"))
        both = [client.submit(PROMPTS[:1], params, adapter="sql") for params in (GREEDY, constrained)]
        running = [asyncio.create_task(each) for each in both]
        await asyncio.sleep(0)
        unloaded = asyncio.create_task(client.unload_adapter("sql"))
        answers = [await texts(await each) for each in running]
        assert answers[0] == await texts(await client.submit(PROMPTS[:1], GREEDY, adapter="first"))
        assert answers[0] != await texts(await client.submit(PROMPTS[:1], GREEDY))
        await unloaded
        for refused, line in (
            (client.load_adapter("first", path), "an adapter 'first' is loaded already"),
            (client.load_adapter("other", f"{path}/nothing"), "is no directory"),
            (client.unload_adapter("sql"), "no adapter 'sql' is loaded"),
            (client.submit(PROMPTS, GREEDY, adapter="sql"), "no adapter 'sql' is loaded"),
        ):
            with pytest.raises(RequestError, match=line):
                await refused

    asyncio.run(ask())
    client.stop()
    engine.check()
