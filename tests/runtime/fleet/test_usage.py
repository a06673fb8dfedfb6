"""Tokens of callers: replicas count them, and the router holds each key to its limit over all of them."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qserve.runtime.engine import Engine
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.limits import usage
from qserve.runtime.server.limits.keys import add_key
from qserve.runtime.server.serve import ServerHandle
from tests.runtime.server.waiting import wait_until

from .conftest import RouterHandle, root, routed
from .test_ingress import call

LIMIT = 60


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Of the router's callers in ``ours.toml``, and of the router in ``theirs.toml``."""
    ours, theirs = tmp_path / "ours.toml", tmp_path / "theirs.toml"
    found = {"router": add_key("router", theirs, router=True), "boss": add_key("boss", ours, admin=True)}
    for name in ("alice", "bob"):
        found[name] = add_key(name, ours)
        with ours.open("a") as file:
            file.write(f"max_tokens_per_minute = {LIMIT if name == 'bob' else 100_000}\n")
    return found


@pytest.fixture
def servers(engines: list[Engine], keys: dict[str, str], tmp_path: Path) -> Iterator[list[ServerHandle]]:
    config = ServerConfig(api_keys_file=tmp_path / "theirs.toml")
    with ServerHandle(engines[0], config=config) as first, ServerHandle(engines[1], config=config) as second:
        yield [first, second]


@pytest.fixture
def router(servers: list[ServerHandle], keys: dict[str, str], tmp_path: Path) -> Iterator[RouterHandle]:
    config = ServerConfig(api_keys_file=tmp_path / "ours.toml")
    with routed([root(each) for each in servers], config, keys["router"]) as handle:
        handle.fleet.router.policy = "round-robin"
        yield handle


def ask(router: RouterHandle, key: str, number: int = 0, **more: Any) -> tuple[int, dict[str, str], Any]:
    body = {"prompt": [5 + number] * 20, "max_tokens": 4, "ignore_eos": True} | more
    return call(f"{router.url}/v1/completions", body, Authorization=f"Bearer {key}")


def used(url: str, key: str) -> dict[str, int]:
    status, _, page = call(f"{url}/v1/usage", Authorization=f"Bearer {key}")
    assert status == 200
    return {each["caller"]: each["tokens"] for each in page["data"]}


def test_a_limit_of_tokens_holds_over_all_replicas(
    router: RouterHandle, servers: list[ServerHandle], keys: dict[str, str]
) -> None:
    answers: list[Any] = []

    def all_are_counted() -> bool:
        return router.fleet.used.tokens.get("bob", 0) == sum(each[2]["usage"]["total_tokens"] for each in answers)

    while (answer := ask(router, keys["bob"], len(answers)))[0] == 200:
        answers.append(answer)
        wait_until(all_are_counted)
    assert len(answers) == 3, "each replica alone would have let it have as many"
    assert answer[0] == 429 and "60 tokens per minute" in answer[2]["error"]["message"]
    assert 1 <= int(answer[1]["retry-after"]) <= 20
    assert ask(router, keys["alice"])[0] == 200, "others have limits of their own"
    each = [used(root(server), keys["router"])["bob"] for server in servers]
    assert all(each) and sum(each) == used(router.url, keys["boss"])["bob"] == 72
    assert call(f"{router.url}/v1/usage", Authorization=f"Bearer {keys['bob']}")[0] == 403


def test_what_a_client_left_is_counted(router: RouterHandle, keys: dict[str, str]) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {keys['alice']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{router.url}/v1/completions", body, headers)) as stream:
        assert stream.readline().startswith(b"data: ")
    wait_until(lambda: router.fleet.used.tokens.get("alice", 0) > 0)


def test_several_choices_and_embeddings_count_as_on_one_server(
    router: RouterHandle, servers: list[ServerHandle], keys: dict[str, str]
) -> None:
    assert ask(router, keys["alice"], n=3)[0] == 200
    assert call(f"{router.url}/v1/embeddings", {"input": "x y z"}, Authorization=f"Bearer {keys['alice']}")[0] == 200
    here = [server.service.accounting.quotas.used.tokens.get("alice", 0) for server in servers]
    assert all(here)
    wait_until(lambda: router.fleet.used.tokens.get("alice", 0) == sum(here))


@given(st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=4), min_size=1, max_size=6))
def test_whatever_restarts_in_between_nothing_counts_twice(steps: Sequence[Sequence[tuple[str, int]]]) -> None:
    """A step is what a replica computes between two looks at it; after an odd one, another process has its place."""
    fleet, seen = Fleet(["http://127.0.0.1:1"], "prefix-aware", None, 1.0), Counter[str]()
    fleet.charge = lambda caller, tokens: seen.update({caller: tokens})
    (replica,) = fleet.replicas.values()
    totals, since, expected = Counter({"a": 7}), 1.0, Counter[str]()
    fleet.count(replica, dict(totals), since)
    for number, step in enumerate(steps):
        for caller, tokens in step:
            totals[caller] += tokens
            expected[caller] += tokens
        fleet.count(replica, dict(totals), since)
        if number % 2:
            totals, since = Counter(), since + 1.0
    assert fleet.used.tokens == +seen == +expected


def test_whatever_names_come_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that forgot a caller counts it from nothing again, and nobody gets tokens back for that."""
    monkeypatch.setattr(usage, "MOST", 3)
    fleet, told = Fleet(["http://127.0.0.1:1"], "prefix-aware", None, 1.0), list[tuple[str, int]]()
    fleet.charge = lambda caller, tokens: told.append((caller, tokens))
    (replica,) = fleet.replicas.values()
    kept = usage.Usage(since=1.0)
    fleet.count(replica, {}, kept.since)
    for caller, tokens in (("a", 9), ("b", 1), ("a", 1), ("c", 1), ("d", 1)):
        kept.add(caller, tokens)
    assert kept.tokens == {"a": 10, "c": 1, "d": 1}
    fleet.count(replica, dict(kept.tokens), kept.since)
    fleet.count(replica, {"a": 2, "e": 5}, kept.since)
    assert told == [("a", 10), ("c", 1), ("d", 1), ("a", 2), ("e", 5)] and len(fleet.used.tokens) == 3
