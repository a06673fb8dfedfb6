"""``Router``: its sums hold whatever happens, loads are bounded, and a prompt goes where its beginning is."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qserve.runtime.digests import chain_digests
from qserve.runtime.router import CALM, OVERLOAD, POLICIES, Placement, Prompt, Router

SIZE = 4


def prompt(*tokens: int, session: str = "") -> Prompt:
    return Prompt(chain_digests(tokens, SIZE), -(-len(tokens) // SIZE), session)


def family(number: int, tail: int) -> Prompt:
    """Three blocks that prompts of this number share, and one of its own."""
    return prompt(*[number] * 3 * SIZE, *[1000 + tail] * SIZE)


class Routing(RuleBasedStateMachine):
    """Anything that may happen to a fleet, with ``check`` after each step and the promises of a placement at each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.serves: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.live: list[Placement] = []
        self.tails = 0

    @rule(name=st.sampled_from("abcd"), models=st.sets(st.sampled_from("mn"), min_size=1), capacity=st.integers(1, 9))
    def add(self, name: str, models: set[str], capacity: int) -> None:
        self.router.add(name, models, capacity)
        self.serves[name] = models
        self.closed.discard(name)

    @precondition(lambda self: self.serves)
    @rule(data=st.data(), what=st.sampled_from(("remove", "close", "forget")))
    def lose(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.serves)))
        getattr(self.router, what)(name)
        if what == "remove":
            del self.serves[name]
        if what == "close":
            self.closed.add(name)

    @rule(
        number=st.integers(0, 3),
        model=st.sampled_from(("m", "n", None)),
        session=st.sampled_from(("", "x")),
        without=st.sets(st.sampled_from("abcd"), max_size=2),
    )
    def place(self, number: int, model: str | None, session: str, without: set[str]) -> None:
        open_ones = [
            name
            for name, models in self.serves.items()
            if name not in self.closed | without and (model is None or model in models)
        ]
        before = {name: self.router.load(name) for name in open_ones}
        self.tails += 1
        found = family(number, self.tails)
        placed = self.router.place(Prompt(found.digests, found.blocks, session), model, without)
        assert (placed is None) == (not open_ones), "a request goes exactly where it can be served"
        if placed is None:
            return
        assert placed.replica in open_ones and 0 <= placed.cached <= 3
        bound = max(CALM, math.ceil(OVERLOAD * (sum(before.values()) + 1) / len(before)))
        assert before[placed.replica] < bound, "a replica above the bound got another request"
        assert self.router.load(placed.replica) == before[placed.replica] + 1
        self.live.append(placed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), what=st.sampled_from(("started", "ended", "refused")), share=st.none() | st.floats(0, 1))
    def go_on(self, data: st.DataObject, what: str, share: float | None) -> None:
        placed = data.draw(st.sampled_from(self.live))
        if what == "started":
            placed.started(share)
        else:
            getattr(placed, what)()
            placed.ended()  # a second end changes nothing
            self.live.remove(placed)

    @invariant()
    def sums_hold(self) -> None:
        self.router.check()


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def two(policy: str = "prefix-aware") -> Router:
    router = Router(policy)
    router.add("a", ["m"])
    router.add("b", ["m"])
    return router


def test_a_prompt_goes_where_its_beginning_is() -> None:
    router = two()
    homes: dict[int, str] = {}
    for tail in range(40):
        placed = router.place(family(tail % 8, tail))
        assert placed is not None
        assert placed.cached == (3 if tail >= 8 else 0)
        assert homes.setdefault(tail % 8, placed.replica) == placed.replica
        placed.started(placed.cached / 4)
        placed.ended()
    assert set(homes.values()) == {"a", "b"}, "nobody has all"


def test_a_replica_that_is_busy_enough_loses_its_prompts() -> None:
    router = two()
    first = router.place(family(0, 0))
    assert first is not None
    first.started(0.0)
    homes = []
    for tail in range(1, 30):
        placed = router.place(family(0, tail))
        assert placed is not None
        homes.append(placed.replica)
    assert homes[0] == first.replica and len(set(homes)) == 2
    assert abs(router.load("a") - router.load("b")) <= 0.25 * 30 + 1


def test_of_equals_the_prompt_decides_so_that_two_routers_agree() -> None:
    chosen = [[two().place(family(number, 0)) for number in range(50)] for _ in range(2)]
    names = [[each.replica for each in row if each] for row in chosen]
    assert names[0] == names[1] and set(names[0]) == {"a", "b"}


def test_a_replica_more_moves_only_what_it_takes() -> None:
    def homes(replicas: str) -> list[str]:
        found = []
        for number in range(200):
            router = Router()
            for name in replicas:
                router.add(name)
            placed = router.place(Prompt(session=f"user {number}", blocks=1))
            assert placed is not None
            found.append(placed.replica)
        return found

    before, after = homes("abc"), homes("abcd")
    assert all(new in (old, "d") for old, new in zip(before, after))
    assert 20 < after.count("d") < 80


def test_a_session_keeps_its_replica_while_nothing_of_the_prompt_is_known() -> None:
    router, homes = two(), set()
    for tail in range(4):
        placed = router.place(Prompt(chain_digests([tail] * SIZE, SIZE), 1, "someone"))
        assert placed is not None
        homes.add(placed.replica)
    assert len(homes) == 1


def test_a_replica_that_evicted_more_than_believed_is_believed_less() -> None:
    router = Router()
    router.add("a")
    for number in range(8):
        placed = router.place(family(number, 0))
        assert placed is not None
        placed.ended()
    placed = router.place(family(0, 1))
    assert placed is not None and placed.cached == 3
    placed.started(0.0)
    placed.ended()
    known = [router.place(family(number, 2)) for number in range(8)]
    found = [each.cached for each in known if each]
    assert found[0] == found[7] == 3, "what was just computed, and what was used late"
    assert found[1] == found[2] == 0


def test_what_a_replica_refused_it_does_not_hold() -> None:
    router = Router()
    router.add("a")
    placed = router.place(family(0, 0))
    assert placed is not None
    placed.refused()
    again = router.place(family(0, 0))
    assert again is not None and again.cached == 0


def test_a_replica_holds_no_more_than_its_capacity() -> None:
    router = Router()
    router.add("a", capacity=4)
    for number in (0, 1):
        router.place(family(number, 0))
    again = router.place(family(0, 0))
    assert again is not None and again.cached == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_all_and_ends_empty(policy: str) -> None:
    router = two(policy)
    placed = [router.place(family(number % 5, number)) for number in range(20)]
    assert {each.replica for each in placed if each} == {"a", "b"}
    if policy != "prefix-aware":
        assert router.load("a") == router.load("b") == 10
    for each in placed:
        assert each is not None
        each.ended()
    assert router.load("a") == router.load("b") == 0
    router.check()


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown routing 'random': choose from prefix-aware"):
        Router("random")
