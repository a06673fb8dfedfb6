"""KV blocks between replicas: the same bits, nobody else gets them, and what is damaged is computed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime import block_files
from qserve.runtime.block_files import BlobError, pack, unpack
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server import kv_exchange
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.kv_order import TICKET_SECONDS, KvOrder, admits, ticket
from qserve.runtime.server.limits.keys import add_key
from qserve.runtime.server.serve import ServerHandle
from tests.runtime.fleet.conftest import RouterHandle, root, routed
from tests.runtime.fleet.test_reports import until

PROMPT = [5 + (7 * number) % 90 for number in range(300)]  # 18 full blocks and a rest


@dataclass
class Pair:
    """Replicas that exchange blocks, behind a router that has a key of theirs."""

    router: RouterHandle
    servers: list[ServerHandle]
    engines: list[Engine]
    key: str

    def only(self, index: int) -> None:
        """Let the others get no new requests."""
        loop = self.router.server.loop
        assert loop is not None
        for number, server in enumerate(self.servers):
            loop.call_soon_threadsafe(self.router.fleet.hold_back, root(server), number != index)
        url = root(self.servers[index])
        until(lambda: [each.url for each in self.router.fleet.ready(None)] == [url], "it is not alone")

    def received(self, index: int) -> int:
        offload = self.engines[index].offload
        assert offload is not None
        return offload.tiers.received


@contextmanager
def exchanging(model: Path, folder: Path, count: int = 2, **config: Any) -> Iterator[Pair]:
    key = add_key("router", folder / "keys.toml", router=True)
    settings = EngineConfig(
        max_model_len=512, max_num_seqs=4, kv_cache_memory=16 << 20, kv_offload_memory=8 << 20, threads=1,
        kv_transfer=True, **config,
    )  # fmt: skip
    engines = [Engine(str(model), settings) for _ in range(count)]
    with ExitStack() as stack:
        keys = ServerConfig(api_keys_file=folder / "keys.toml")
        servers = [stack.enter_context(ServerHandle(each, config=keys)) for each in engines]
        router = stack.enter_context(routed([root(each) for each in servers], key=key))
        yield Pair(router, servers, engines, key)


def ask(url: str, prompt: Sequence[int], key: str | None = None) -> dict[str, Any]:
    body = {"prompt": [*prompt], "max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 2}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
        cached = int(answer.headers["X-Cached-Tokens"])
        return {"choices": content["choices"], "cached": cached, "tokens": content["usage"]["total_tokens"]}


@pytest.mark.parametrize(("dtype", "ranks"), [("fp32", 1), ("fp8", 1), pytest.param("bf16", 2, marks=pytest.mark.slow)])
def test_a_prompt_of_another_replica_comes_with_the_same_bits(
    tiny_model: Path, tmp_path: Path, dtype: str, ranks: int
) -> None:
    with exchanging(tiny_model, tmp_path, kv_cache_dtype=dtype, tensor_parallel_size=ranks) as pair:
        pair.only(0)
        first = ask(pair.router.url, PROMPT)
        pair.only(1)
        second = ask(pair.router.url, PROMPT)
        assert first["cached"] == 0 and second["cached"] == 18 * 16 and pair.received(1) == 18
        assert first["choices"] == second["choices"], "text, tokens and log-probabilities"
        again = ask(pair.router.url, PROMPT)
        assert again["choices"] == first["choices"] and pair.received(1) == 18, "it is there now"
        page = urllib.request.Request(
            root(pair.servers[1]) + "/metrics", headers={"Authorization": f"Bearer {pair.key}"}
        )
        with urllib.request.urlopen(page) as answer:
            text = answer.read().decode()
        assert 'qserve:kv_transfer_received_blocks_total{' in text
        for engine in pair.engines:
            engine.check()


def test_what_is_damaged_on_the_way_is_computed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(key: block_files.Key, content: bytes) -> bytes:
        good = pack(key, content)
        return good[:-9] + bytes([good[-9] ^ 4]) + good[-8:]

    with exchanging(tiny_model, tmp_path) as pair:
        pair.only(0)
        first = ask(pair.router.url, PROMPT)
        monkeypatch.setattr(kv_exchange, "pack", damage)
        pair.only(1)
        second = ask(pair.router.url, PROMPT)
        assert second["cached"] == 0 and pair.received(1) == 0 and second["choices"] == first["choices"]
        assert "a KV block is damaged" in caplog.text


def test_a_prompt_that_is_computed_sooner_is_not_fetched(tiny_model: Path, tmp_path: Path) -> None:
    with exchanging(tiny_model, tmp_path) as pair:
        pair.only(0)
        first = ask(pair.router.url, PROMPT)
        offload = pair.engines[1].offload
        assert offload is not None
        for _ in range(200):
            offload.tiers.computed(1e-9)
        pair.only(1)
        ask(pair.router.url, [3] * 20)  # tells the server
        second = ask(pair.router.url, PROMPT)
        assert pair.received(1) == 0 and second["cached"] == 0 and second["choices"] == first["choices"]


def test_a_replica_that_only_computes_prompts(tiny_model: Path, tmp_path: Path) -> None:
    with exchanging(tiny_model, tmp_path, count=3) as pair:
        names = {name for each in pair.router.fleet.replicas.values() for name in each.models}
        pair.router.fleet.prefill = dict.fromkeys(names, 1)
        (name,) = names
        pair.router.fleet.default_model = name
        first = sorted(root(each) for each in pair.servers)[0]
        prefiller = next(i for i, each in enumerate(pair.servers) if root(each) == first)
        answers = [ask(pair.router.url, [number, *PROMPT]) for number in range(4)]
        assert all(each["cached"] == 18 * 16 for each in answers), "all but the rest of a prompt is fetched"
        assert pair.received(prefiller) == 0 and sum(map(pair.received, range(3))) == 4 * 18
        stats = [each.service.engine.stats for each in pair.servers]
        assert stats[prefiller].prefix_queries >= 4 * 300, "it computed every prompt"
        used = [sum(each.service.accounting.quotas.used.tokens.values()) for each in pair.servers]
        assert used[prefiller] == 0 and sum(used) >= 4 * 301, "a prompt is paid for once, where it is answered"
        assert sum(used) == sum(each["tokens"] for each in answers)
        pair.router.fleet.prefill = {}
        alone = Engine(str(tiny_model), EngineConfig(max_model_len=512, kv_cache_memory=16 << 20, threads=1))
        with ServerHandle(alone) as server:
            for number, answer in enumerate(answers):
                assert ask(root(server), [number, *PROMPT])["choices"] == answer["choices"]


def test_nobody_reads_blocks_without_a_ticket_of_a_router(tiny_model: Path, tmp_path: Path) -> None:
    with exchanging(tiny_model, tmp_path, count=1) as pair:
        caller = add_key("ann", tmp_path / "keys.toml")
        pair.servers[0].service.keys.reload()
        ask(root(pair.servers[0]), PROMPT, caller)
        digest = pair.engines[0].scheduler.blocks.findable()[0][0][1].hex()
        info = pair.engines[0].offload
        assert info is not None

        def status(shown: str | None, identity: str = info.identity, digests: object = (digest,)) -> int:
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {shown}"} if shown else {})
            body = json.dumps({"identity": identity, "digests": digests}).encode()
            request = urllib.request.Request(root(pair.servers[0]) + "/v1/kv/blocks", body, headers)
            try:
                with urllib.request.urlopen(request) as answer:
                    assert len(unpack(answer.read(), info.block_bytes)) == 1
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        now = time.time()
        good = ticket(pair.key, now)
        assert status(good) == 200
        for bad in (None, caller, pair.key, ticket(caller, now), ticket(pair.key, now - TICKET_SECONDS - 1), good[:-1]):
            assert status(bad) == 401
        assert status(good, identity="x") == 404
        assert [status(good, digests=bad) for bad in ([], ["x"], [digest] * 99999, 3)] == [400] * 4
        order = KvOrder("http://127.0.0.1:1", good)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {caller}"}
        request = urllib.request.Request(
            root(pair.servers[0]) + "/v1/completions", body, headers | {"X-Qserve-KV": order.header()}
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200, "a caller's order is not read"


def test_an_open_server_gives_no_blocks(engines: list[Engine]) -> None:
    with ServerHandle(engines[0]) as server:
        request = urllib.request.Request(root(server) + "/v1/kv/blocks", b"{}", {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request)


def test_tickets_have_one_form() -> None:
    digest, now = sha256(b"key").digest(), 1e9
    good = ticket("key", now)
    assert admits(good, [b"x" * 32, digest], now) and not admits(good, [b"x" * 32], now) and not admits(good, [], now)
    for bad in ("", "kv-", "kv-1-", good.replace("kv-", ""), good + "0", f"kv-{'9' * 40}-x", good.replace("-1", "-2")):
        assert not admits(bad, [digest], now)
    assert not admits(good, [digest], now + TICKET_SECONDS + 1)


def test_blobs_are_whole_or_refused() -> None:
    key, block = (1, b"d" * 32), bytes(range(64))
    content = pack(key, block) + pack((0, b"e" * 32), block)
    assert unpack(content, 64) == [(key, block), ((0, b"e" * 32), block)] and unpack(b"", 64) == []
    for place in (0, 12, 20, 60, len(content) - 1):
        with pytest.raises(BlobError, match="damaged"):
            unpack(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :], 64)
    with pytest.raises(BlobError, match="no whole KV blocks"):
        unpack(content[:-1], 64)
