"""The engine at one moment: its requests, their blocks, and the last steps."""

from __future__ import annotations

from qserve.runtime.blocks import BlockManager
from qserve.runtime.journal import FIRST_TOKENS, STEPS, Journal
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.scheduler import Scheduler
from qserve.runtime.server.telemetry.engine_view import CACHED, FIRST_REQUEST, FREE, MAX_CELLS, SHARED, to_json
from qserve.runtime.snapshot import MAX_WAITING, EngineSnapshot, take

SIZE = 4


class World:
    """A scheduler whose every sampled token is 7, with a journal."""

    def __init__(self, num_blocks: int = 16, max_num_seqs: int = 4) -> None:
        config = SchedulerConfig(max_model_len=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=8)
        self.scheduler = Scheduler(config, BlockManager(num_blocks, SIZE))
        self.journal = Journal()
        self.now = 0.0

    def add(self, request_id: str, prompt: int, outputs: int = 8, first: int = 1) -> None:
        tokens = tuple(range(first, first + prompt))
        arrival = len(self.scheduler.request_ids())
        params = SamplingParams(max_tokens=outputs)
        self.scheduler.add(Request(request_id, tokens, params, arrival=arrival, arrival_time=self.now))

    def step(self) -> None:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        assert plan is not None
        self.journal.step(plan, self.now)
        self.scheduler.commit(plan, {s.request_id: (7,) for s in plan.sequences if s.num_sampled})

    def look(self) -> EngineSnapshot:
        return take(self.scheduler, self.journal, self.now)


def test_an_idle_engine_is_empty() -> None:
    picture = to_json(World().look())
    assert picture["num_running"] == picture["num_waiting"] == 0
    assert picture["requests"] == picture["steps"] == picture["first_tokens"] == []
    assert picture["kv"]["cells"] == [[FREE, 16]]
    assert picture["kv"]["free"] == picture["kv"]["total"] == 16


def test_states_counts_and_blocks_of_requests() -> None:
    world = World()
    world.add("a", 6)
    world.add("b", 12, first=100)
    world.step()
    a, b = world.look().running
    assert (a.request_id, a.state, a.prompt_tokens, a.computed_tokens, a.output_tokens) == ("a", "decode", 6, 6, 1)
    assert (b.request_id, b.state, b.prompt_tokens, b.computed_tokens, b.output_tokens) == ("b", "prefill", 12, 2, 0)
    assert a.blocks == world.scheduler.blocks.table("a") and a.age == 1.0
    picture = to_json(world.look())
    assert [request["blocks"] for request in picture["requests"]] == [2, 3]
    assert sum(count for what, count in picture["kv"]["cells"] if what == FIRST_REQUEST) == 2
    assert sum(count for what, count in picture["kv"]["cells"] if what == FIRST_REQUEST + 1) == 3
    assert picture["kv"]["used"] == 5 and picture["kv"]["shared"] == 0


def test_shared_and_cached_blocks_are_told_apart() -> None:
    world = World()
    world.add("a", 8, outputs=8)
    world.step()
    world.add("b", 8, outputs=1)
    world.step()
    assert not world.scheduler.finish("b", "abort"), "its one output ended it"
    world.add("c", 8)
    world.step()
    picture = to_json(world.look())
    assert picture["kv"]["shared"] == 1 and picture["requests"][1]["cached_tokens"] == SIZE
    world.scheduler.finish("a", "abort")
    world.scheduler.finish("c", "abort")
    picture = to_json(world.look())
    assert picture["kv"]["used"] == picture["kv"]["shared"] == 0
    assert picture["kv"]["cached"] == world.scheduler.blocks.num_cached > 0
    assert picture["kv"]["cached"] + picture["kv"]["free"] == 16
    assert {what for what, _ in picture["kv"]["cells"]} == {FREE, CACHED}


def test_waiting_requests_are_counted_and_the_first_of_them_shown() -> None:
    world = World(max_num_seqs=1)
    for i in range(MAX_WAITING + 10):
        world.add(f"r{i}", 3)
    world.step()
    picture = to_json(world.look())
    assert picture["num_running"] == 1 and picture["num_waiting"] == MAX_WAITING + 9
    assert len(picture["requests"]) == 1 + MAX_WAITING
    assert [request["state"] for request in picture["requests"][:2]] == ["decode", "waiting"]


def test_a_preempted_request_waits_without_blocks() -> None:
    world = World(num_blocks=4)
    world.add("a", 7, outputs=8)
    world.add("b", 3, outputs=12)
    for _ in range(20):
        world.step()
        if world.scheduler.num_preemptions:
            break
    (waiting,) = world.look().waiting
    assert (waiting.request_id, waiting.state, waiting.blocks) == ("b", "preempted", ())


def test_many_blocks_share_a_cell_and_none_in_use_is_lost() -> None:
    world = World(num_blocks=3 * MAX_CELLS - 1)
    world.add("a", 6)
    world.step()
    picture = to_json(world.look())
    cells = [what for what, count in picture["kv"]["cells"] for _ in range(count)]
    assert picture["kv"]["blocks_per_cell"] == 3 and len(cells) == MAX_CELLS
    held = {block // 3 for block in world.scheduler.blocks.table("a")}
    assert {cell for cell, what in enumerate(cells) if what == FIRST_REQUEST} == held
    assert SHARED not in cells


def test_the_journal_tells_prefill_from_decode_and_forgets() -> None:
    world = World()
    world.add("a", 12, outputs=3)
    for _ in range(4):
        world.step()
    journal = world.journal
    assert [(s.step, s.prefill_tokens, s.decode_tokens) for s in journal.steps()] == [
        (0, 8, 0),
        (1, 4, 0),
        (2, 0, 1),
        (3, 0, 1),
    ]
    assert (journal.prompt_tokens, journal.output_tokens) == (12, 3)
    world.add("b", 4, outputs=1)
    plan = world.scheduler.schedule(9.0)
    assert plan is not None
    for i in range(STEPS + 5):
        journal.step(plan, float(i))
        journal.first_token(float(i), 0.5)
    assert len(journal.steps()) == STEPS and len(journal.first_tokens()) == FIRST_TOKENS
    assert journal.first_tokens()[-1].time == STEPS + 4
