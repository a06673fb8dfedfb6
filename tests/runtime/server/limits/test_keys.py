"""API keys: the file that holds them, what each may ask for, and how keys are told apart."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from qserve.checkpoint.errors import UsageError
from qserve.runtime.constraint import Constraint
from qserve.runtime.engine import Engine
from qserve.runtime.sampling import RequestError
from qserve.runtime.server import serve
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.limits.keys import ApiKey, KeyRing, add_key, read_keys
from qserve.runtime.server.limits.quota import QuotaError, Quotas
from qserve.runtime.server.limits.rate import ServiceRate
from qserve.runtime.server.serve import ServerHandle

LIMITS = {
    "alice": "max_requests = 2",
    "bob": "max_tokens_per_minute = 40",
    "batch": "priority = 5\nweight = 0.5",
    "vip": "priority = -5",
    "watcher": "admin = true",
}


def test_a_new_key_is_stored_as_its_hash_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [add_key(name, path) for name in ("alice", "bob")]
    text = path.read_text()
    assert not any(key in text for key in keys) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [key.name for key in read_keys(path)] == ["alice", "bob"]
    ring = KeyRing(["plain"], path)
    assert len(ring) == 3 and ring.find(b"nobody's") is None
    found = [ring.find(key.encode()) for key in keys]
    assert [key.name for key in found if key] == ["alice", "bob"]
    assert keys[0] not in repr(found) and sha256(keys[0].encode()).hexdigest() not in repr(found)
    with pytest.raises(UsageError, match="has a key of the name 'bob' already"):
        add_key("bob", path)
    with pytest.raises(UsageError, match="name must have"):
        add_key('b"ob', path)
    add_key("prometheus", path, admin=True)
    assert [key.admin for key in read_keys(path)] == [False, False, True]


def test_every_key_is_compared_in_constant_time_and_as_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is presented, the same comparisons are made: they end neither at the right key nor at a wrong byte."""
    compare, compared = hmac.compare_digest, []

    def told(presented: bytes, known: bytes) -> bool:
        compared.append((presented, known))
        return compare(presented, known)

    monkeypatch.setattr(hmac, "compare_digest", told)
    ring = KeyRing(["one", "two", "three"])
    for presented in (b"one", b"three", b"thre", b"", b"a" * 10_000):
        compared.clear()
        found = ring.find(presented)
        assert (found is not None) == (presented in (b"one", b"three"))
        digest = sha256(presented).digest()
        assert compared == [(digest, sha256(key).digest()) for key in (b"one", b"two", b"three")]


def test_a_file_made_for_the_server_takes_its_first_key(tmp_path: Path) -> None:
    """One made by an administrator, with the owner and the mode that the server needs."""
    path = tmp_path / "keys.toml"
    path.write_text("# who may call\n")
    path.chmod(0o640)
    key = add_key("alice", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert KeyRing((), path).find(key.encode()) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("key = 3", "must hold"),
        ("[[key]", "not valid TOML"),
        ("other = 1\n[[key]]", "must hold"),
        ("[[key]]\nname = 'a'", "key 1: sha256"),
        (f"[[key]]\nsha256 = '{'0' * 64}'", "key 1: name"),
        (f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\nkey = 'secret'", "unknown field 'key'"),
        (f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\nmax_requests = 0", "max_requests"),
        (f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\nmax_requests = true", "max_requests"),
        (f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\nweight = nan", "weight"),
        (f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\npriority = 1001", "priority"),
        (f"[[key]]\nname = 'a'\nsha256 = '{'0' * 64}'\n" * 2, "same name"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_keys(path)
    assert "secret" not in str(caught.value).replace("'key'", "")
    with pytest.raises(OSError):
        read_keys(tmp_path / "missing.toml")


def test_a_reload_takes_a_good_file_and_leaves_a_broken_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    old = add_key("old", path)
    ring = KeyRing((), path)
    path.write_text("[[key]")
    with caplog.at_level(logging.ERROR):
        assert not ring.reload()
    assert len(caplog.records) == 1 and "stay as they were" in caplog.text
    assert ring.find(old.encode())
    path.unlink()
    assert not ring.reload() and ring.find(old.encode())
    new = add_key("new", path)
    assert ring.reload() and ring.find(new.encode()) and not ring.find(old.encode())


def test_sighup_reads_the_keys_again_also_while_the_model_is_loaded(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key("first", path)
    sock = serve.claim_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/models"

    def status(key: str) -> int:
        return httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=20).status_code

    def load() -> Engine:
        loading.append(add_key("second", path))
        os.kill(os.getpid(), signal.SIGHUP)
        return engine

    def opened() -> None:
        assert status(loading[0]) == 200
        new = add_key("third", path)
        assert status(new) == 401
        os.kill(os.getpid(), signal.SIGHUP)
        assert status(new) == 200
        os.kill(os.getpid(), signal.SIGTERM)

    loading: list[str] = []
    ends_a_process: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda *_: ends_a_process.append(1))
    try:
        serve.serve(load, config=ServerConfig(api_keys_file=path), sock=sock, opened=opened)
        assert not ends_a_process
        os.kill(os.getpid(), signal.SIGHUP)
        assert ends_a_process, "the signal is given back"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_quotas_count_requests_and_refill_evenly() -> None:
    key = ApiKey("a", b"", max_requests=3, max_tokens_per_minute=60)
    quotas = Quotas()
    quotas.began(key, 2)
    quotas.check(key, 1, 0.0)
    with pytest.raises(QuotaError, match="3 requests at once"):
        quotas.check(key, 2, 0.0)
    quotas.ended(key, 2)
    quotas.spend(key, 50, 0.0)
    quotas.check(key, 3, 0.0)
    quotas.spend(key, 30, 10.0)  # 50 - 10 + 30
    with pytest.raises(QuotaError, match="60 tokens per minute") as caught:
        quotas.check(key, 1, 10.0)
    assert caught.value.retry_after == pytest.approx(10.0)
    quotas.check(key, 1, 21.0)
    quotas.check(ApiKey("b", b"", max_requests=1), 1, 10.0)


def test_the_backlog_takes_its_tokens_over_the_measured_rate() -> None:
    rate = ServiceRate(0.0)
    assert rate.backlog_seconds(10, 1000, 5.0) == 0.0, "nothing was measured"
    for second in range(10):
        rate.computed(100, second + 0.5)
    rate.finished(50, 9.0)
    assert rate.backlog_seconds(2, 400, 10.0) == pytest.approx((400 + 2 * 50) / 100)
    assert rate.backlog_seconds(2, 400, 1000.0) == 0.0, "what was measured is too long ago"


@pytest.fixture(scope="module")
def keyed(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerHandle, dict[str, str]]]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    for name, limits in LIMITS.items():
        keys[name] = add_key(name, path)
        with path.open("a") as file:
            file.write(f"{limits}\n")
    with ServerHandle(engine, config=ServerConfig(api_keys=("first-key",), api_keys_file=path)) as server:
        yield server, keys | {"given": "first-key"}


@pytest.mark.parametrize("path", ["/metrics", "/v1/engine", "/v1/engine/events", "/v1/usage"])
def test_what_all_callers_do_is_shown_to_admins(keyed: tuple[ServerHandle, dict[str, str]], path: str) -> None:
    server, keys = keyed

    def status(name: str) -> int:
        headers = {"Authorization": f"Bearer {keys[name]}"}
        with httpx.stream("GET", server.url.removesuffix("/v1") + path, headers=headers, timeout=20) as response:
            if response.status_code == 403:
                assert json.loads(response.read())["error"]["code"] == "admin_only"
            return response.status_code

    assert {name: status(name) for name in keys} == dict.fromkeys(LIMITS, 403) | {"watcher": 200, "given": 200}


def post(keyed: tuple[ServerHandle, dict[str, str]], name: str, **body: Any) -> httpx.Response:
    server, keys = keyed
    body = {"prompt": [5] * 10, "max_tokens": 5, "ignore_eos": True} | body
    headers = {"Authorization": f"Bearer {keys[name]}"}
    return httpx.post(f"{server.url}/completions", json=body, headers=headers, timeout=60)


def test_a_key_has_at_most_so_many_requests_at_once(keyed: tuple[ServerHandle, dict[str, str]], slow: None) -> None:
    server, keys = keyed
    never = post(keyed, "alice", n=3)
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    body = {"prompt": "the", "max_tokens": 400, "n": 2, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {keys['alice']}"}
    with httpx.stream("POST", f"{server.url}/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = post(keyed, "alice")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert post(keyed, "batch").status_code == 200, "another key is not touched"
    while post(keyed, "alice").status_code == 429:  # until the server has seen that the client left
        pass
    assert post(keyed, "alice").status_code == 200


def test_a_constraint_that_is_tried_out_counts(
    keyed: tuple[ServerHandle, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two requests that alice may have wait for a trial; where it ends with a refusal, there is room again."""
    server, _ = keyed
    tried, go_on = threading.Event(), threading.Event()

    async def trial(constraint: Constraint, tenant: str = "") -> str:
        tried.set()
        await asyncio.to_thread(go_on.wait, 30)
        raise RequestError("it does not compile", constraint.param)

    monkeypatch.setattr(server.service.constraints, "grammar", trial)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, keyed, "alice", n=2, guided_choice=["yes", "no"])
        assert tried.wait(30)
        during = post(keyed, "alice").status_code
        go_on.set()
        assert waiting.result().status_code == 400
    assert (during, post(keyed, "alice", n=2).status_code) == (429, 200)


def test_a_key_has_so_many_tokens_per_minute(keyed: tuple[ServerHandle, dict[str, str]]) -> None:
    codes = [post(keyed, "bob").status_code for _ in range(3)]
    assert codes == [200, 200, 200], "the third overdraws"
    refused = post(keyed, "bob")
    assert refused.status_code == 429 and "40 tokens per minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 15


@pytest.mark.parametrize(
    ("seed", "more"),
    [
        (1, {"n": 1}),
        (2, {"n": 8}),
        (3, {"n": 8, "prompt_logprobs": 1}),
        (4, {"n": 8, "prompt_logprobs": 1, "max_tokens": 1}),  # the first has ended before the others begin
        (5, {"n": 3, "use_beam_search": True}),
    ],
)
def test_a_key_pays_for_the_prompt_tokens_that_are_computed(
    keyed: tuple[ServerHandle, dict[str, str]], engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int, more: Any
) -> None:
    quotas, paid = keyed[0].service.accounting.quotas, []
    spend = quotas.spend
    monkeypatch.setattr(quotas, "spend", lambda key, tokens, now: (paid.append(tokens), spend(key, tokens, now)))
    before = engine.journal.prompt_tokens
    answer = post(keyed, "vip", prompt=[100 + seed] * 60, **more)
    completion = answer.json()["usage"]["completion_tokens"]
    assert sum(paid) == engine.journal.prompt_tokens - before + completion


def test_a_key_has_a_best_priority(keyed: tuple[ServerHandle, dict[str, str]]) -> None:
    refused = post(keyed, "batch", priority=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert post(keyed, "batch", priority=5).status_code == 200
    assert post(keyed, "batch").status_code == 200, "the default is what it may have"


def test_a_key_without_a_limit_goes_before_nobody(keyed: tuple[ServerHandle, dict[str, str]]) -> None:
    for asked, status in ((-1000, 403), (-1, 403), (0, 200), (1000, 200)):
        answer = post(keyed, "alice", priority=asked)
        assert answer.status_code == status, asked
    assert post(keyed, "vip", priority=-5).status_code == 200, "its line of the file says so"
    assert post(keyed, "vip", priority=-6).status_code == 403


def test_without_keys_a_priority_orders_what_is_ones_own(engine: Engine) -> None:
    with ServerHandle(engine) as server:
        body = {"prompt": "the", "max_tokens": 1, "priority": -1000}
        assert httpx.post(f"{server.url}/completions", json=body, timeout=60).status_code == 200


def test_keys_are_neither_logged_nor_told(
    keyed: tuple[ServerHandle, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    server, keys = keyed
    with caplog.at_level(logging.DEBUG):
        wrong = httpx.post(f"{server.url}/completions", headers={"Authorization": "Bearer wrong-key"})
        assert post(keyed, "batch").status_code == 200
    assert wrong.status_code == 401
    for secret in (*keys.values(), "wrong-key"):
        assert secret not in caplog.text and secret not in wrong.text
