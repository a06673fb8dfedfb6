"""A load on the real server with a tiny model, and on servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint.errors import QServeError, UsageError
from qserve.evals.bench.client import Answer, Client
from qserve.evals.bench.drive import Run
from qserve.evals.bench.job import Found, Job, run
from qserve.evals.bench.level import Level, ceiling
from qserve.evals.bench.summary import bench_report
from qserve.evals.bench.workload import Session, Turn, Words, read_dataset
from qserve.evals.lengths import Lengths
from qserve.evals.page import page
from qserve.evals.slo import Slo, parse_slo
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

KEY = "bench-key"
FIELDS = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_packed: Path) -> Iterator[ServerHandle]:
    engine = Engine(str(tiny_packed), EngineConfig(max_num_seqs=8, kv_cache_memory=64 << 20, threads=1))
    with ServerHandle(engine, config=ServerConfig(api_keys=(KEY,))) as handle:
        yield handle
    engine.check()


def load(server: ServerHandle, model: str | None = None, key: str | None = KEY, **options: Any) -> Found:
    job = Job(**{"levels": (2.0,), "is_open": False, "prompt": Lengths(24), "output": Lengths(6), **options})
    return run(job, Client(server.url, key, 60), model, FIELDS, lambda done, total: None)


def test_a_closed_loop_counts_what_the_server_counts(server: ServerHandle) -> None:
    found = load(server, levels=(1.0, 3.0), requests=6)
    assert found.unit == "concurrent requests" and [level.value for level in found.levels] == [1.0, 3.0]
    for level in found.levels:
        records = level.run.records
        assert len(records) == 6 and not level.run.failed and level.run.counted and level.run.stopped is None
        assert set(records.output) == {6}
        assert 12 < sum(records.prompt) / 6 < 48, "about 24, for a tokenizer of bytes"
        assert level.run.cached_tokens == 0, "no prompt is found in the prefix cache"
        for due, sent, first, end in zip(records.arrival, records.scheduled, records.first, records.end):
            assert due == sent < first <= end
        assert level.rate == pytest.approx(36 / level.seconds)


def test_an_open_loop_counts_from_when_requests_were_due(server: ServerHandle) -> None:
    (level,) = load(server, levels=(50.0,), is_open=True, requests=10, burst=5).levels
    records = level.run.records
    assert len(records) == 10
    assert all(sent >= due for due, sent in zip(records.arrival, records.scheduled))
    assert all(first >= sent for sent, first in zip(records.scheduled, records.first))
    assert len(set(records.arrival)) == 2, "two bursts"
    assert level.late == max(records.queue())


def test_a_trace_is_repeated_at_its_times(server: ServerHandle, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    shared = {"prefix": "a", "prefix_tokens": 16}
    lines = [{"arrival": 7.0 + n / 20, "prompt": 20 + n, "output": 2 + n, **shared} for n in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    (level,) = load(server, levels=(1.0,), is_open=True, trace=trace).levels
    records = level.run.records
    by_time = sorted(zip(records.arrival, records.output))
    assert [output for _, output in by_time] == [2, 3, 4, 5]
    assert [time - by_time[0][0] for time, _ in by_time] == pytest.approx([0, 0.05, 0.1, 0.15])


def test_turns_carry_the_conversation_and_prefixes_are_shared(server: ServerHandle) -> None:
    for endpoint in ("completions", "chat"):
        (level,) = load(server, endpoint=endpoint, requests=6, turns=3, warmup=0).levels
        prompts = sorted(level.run.records.prompt)
        assert len(prompts) == 6, level.run.reasons
        assert prompts[-1] > prompts[0] + 30, "the third turn holds the first two"
        assert level.run.cached_tokens > 0, "and finds them in the prefix cache"
    (level,) = load(server, requests=6, prefixes=1, prefix_tokens=128, warmup=0).levels
    # The length of random words is learned from two short prompts, so a prefix may have half of the wanted tokens.
    assert min(level.run.records.prompt) > 64 and level.run.cached_tokens >= 4 * 48


def test_a_dataset(server: ServerHandle, tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    talks = [
        {"conversations": [{"from": "human", "value": "hello fox"}, {"from": "gpt", "value": "a b c d e f"}]},
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "hello dog"},
                      {"role": "assistant", "content": "one two three"}]},
        {"prompt": "the lazy dog", "output": "over"},
        {"messages": [{"role": "user", "content": "never answered"}]},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, talks)))
    (level,) = load(server, requests=6, dataset=path).levels
    assert sorted(level.run.records.output) == [1, 1, 4, 4, 8, 8], "the words of the answers, for tokens, each twice"
    path.write_text('{"unknown": 1}')
    with pytest.raises(QServeError, match="line 1: neither conversations"):
        read_dataset(path, 1, 0)
    path.write_text(json.dumps(talks[-1]))
    with pytest.raises(QServeError, match="no conversation"):
        read_dataset(path, 1, 0)


def test_what_a_server_refuses_is_one_line(server: ServerHandle) -> None:
    with pytest.raises(QServeError, match=r"answered 401: .*key"):
        load(server, key="wrong")
    with pytest.raises(QServeError, match="does not serve nobody; it lists"):
        load(server, model="nobody")
    with pytest.raises(UsageError, match="5000 and outputs of 6 tokens exceed the 487 that are filled of the"):
        load(server, prompt=Lengths(5000))


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        job = Job((1.0,), False, Lengths(8), Lengths(8))
        with pytest.raises(QServeError, match="cannot be reached: connection refused"):
            run(job, Client(f"http://127.0.0.1:{port}/v1"), None, {}, lambda done, total: None)


class Scripted:
    """A server of raw bytes: each POST is answered by the next of ``answers``; after the last it is gone."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = iter(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        models = b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 25\r\n\r\n{"data": [{"id": "fox"}]}'
        while True:
            peer, _ = self._listener.accept()
            with peer:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += peer.recv(65536)
                if head.startswith(b"GET"):
                    peer.sendall(models)
                    continue
                answer = next(self._answers, None)
                if answer is None:
                    self._listener.close()
                    return
                peer.sendall(answer)


def events(*chunks: Any, chunked: bool = False) -> bytes:
    """A response that streams them and closes."""
    lines = [f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n".encode() for each in chunks]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
    if not chunked:
        return head + b"\r\n" + b"".join(lines)
    # Cut where no event ends.
    text = b"".join(lines)
    parts = [text[start : start + 7] for start in range(0, len(text), 7)]
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""]
    )


def said(text: str, end: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": end}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
WHOLE = (said("a"), said("b"), said("", "length"), USAGE, "[DONE]")


def ask(answer: bytes) -> Answer:
    return asyncio.run(Client(Scripted([answer]).url, timeout=30).stream({"prompt": "x"}, "completions"))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_stream_is_read_as_it_is_framed(chunked: bool) -> None:
    answer = ask(events(*WHOLE, chunked=chunked))
    assert (answer.end, answer.status, answer.text) == ("done", 200, "ab")
    assert (answer.tokens, answer.prompt_tokens, len(answer.times)) == (3, 9, 2)
    assert answer.sent < answer.times[0] <= answer.last


@pytest.mark.parametrize(
    ("answer", "end", "word"),
    [
        (events(*WHOLE[:2]), "truncated", "no end"),
        (events(said("a"), {"error": {"message": "out of luck"}}), "error", "out of luck"),
        (events("{"), "truncated", "shape"),
        (events("[1]"), "truncated", "shape"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "truncated", "no stream"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nfull", "refused", "full"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "truncated", "within the response"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "truncated", ""),
        (b"", "truncated", "within the response"),
    ],
)
def test_what_is_no_whole_answer(answer: bytes, end: str, word: str) -> None:
    found = ask(answer)
    assert found.end == end and word in found.reason


def test_a_server_that_dies_leaves_what_was_measured() -> None:
    server = Scripted([events(*WHOLE)] * 5)  # two to learn its tokens, three that count
    job = Job((1.0, 2.0), False, Lengths(9), Lengths(3), requests=8, warmup=0)
    found = run(job, Client(server.url, timeout=30), None, {}, lambda done, total: None)
    (level,) = found.levels
    assert len(level.run.records) == 3 and level.run.stopped == "the server is gone: connection refused"
    report = bench_report(found.levels, found.unit, "t", "c", {})
    assert report.data["partial"] and report.data["stopped"] == level.run.stopped
    (troubles,) = [section for section in report.sections if section.title == "What did not go as planned"]
    assert ("1", "partial", "3 not sent or not awaited", level.run.stopped) in troubles.rows


def test_a_server_that_refuses_everything() -> None:
    server = Scripted([*[events(*WHOLE)] * 2, *[b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nfull"] * 3])
    job = Job((1.0,), False, Lengths(9), Lengths(3), requests=3, warmup=0)
    with pytest.raises(QServeError, match="no request was answered: full"):
        run(job, Client(server.url, timeout=30), None, {}, lambda done, total: None)


def test_a_server_that_counts_no_tokens() -> None:
    server = Scripted([events(said("a"), said("b", "stop"), "[DONE]")] * 9)
    job = Job((1.0,), False, Lengths(9), Lengths(3), requests=3, warmup=0)
    (level,) = run(job, Client(server.url, timeout=30), None, {}, lambda done, total: None).levels
    assert list(level.run.records.output) == [2, 2, 2] and not level.run.counted


def level_of(value: float, ttft: float, count: int = 20, broken: int = 0) -> Level:
    """Answers of 5 tokens, 10 ms each after the first; ``broken`` of them failed."""
    found = Run(count, began=0.0, ended=10.0, cpu=0.5)
    for index in range(count - broken):
        answer = Answer(float(index), "done", tokens=5, prompt_tokens=7)
        answer.times = [index + ttft + step / 100 for step in range(5)]
        answer.last = answer.times[-1]
        found.add(index, float(index), answer)
    for index in range(broken):
        found.add(index, 0.0, Answer(0.0, "refused", 429, "too many"))
    return Level(value, found, Slo(0.5, 0.05))


def test_the_figures_follow_from_the_times() -> None:
    level = level_of(4, 0.2, broken=5)
    times = level.latencies()
    assert times["ttft"]["p99"] == pytest.approx(0.2) and times["itl"]["p50"] == pytest.approx(0.01)
    assert times["tpot"]["mean"] == pytest.approx(0.01) and times["e2e"]["p50"] == pytest.approx(0.24)
    assert level.seconds == pytest.approx(14.24) and level.rate == pytest.approx(75 / 14.24)
    assert level.good_share == 0.75 and not level.kept, "failures are not good"
    assert level.run.failures == {"429": 5} and level.busy == pytest.approx(0.05) and not level.client_was_the_limit


def test_the_ceiling_and_its_report() -> None:
    levels = [level_of(1, 0.1), level_of(2, 0.2), level_of(4, 0.7), level_of(8, 0.1)]
    assert ceiling(levels) is levels[1], "before the first that breaks, not the last that keeps"
    assert ceiling(levels[2:]) is None
    report = bench_report(levels, "concurrent requests", "t", "c", {}, parse_slo("ttft=500ms,tpot=50ms"))
    assert report.data["ceiling"] == 2 and json.dumps(report.to_json(), allow_nan=False)
    assert report.plots[0].marks == ((2, "ceiling: 2"),)
    text = page(report)
    assert text.count("<svg") == 4 and "ceiling: 2<" in text and "Even the lightest" not in text
    assert "Even the lightest" in page(bench_report(levels[2:], "u", "t", "c", {}, Slo(0.5, 0.05)))
    single = bench_report(levels[:1], "u", "t", "c", {})
    assert single.data["ceiling"] is None and len(single.plots) == 2 and not single.data["slo"]


def test_words_have_the_tokens_asked_for() -> None:
    words = Words("salt", 0.0, 1.0)
    words.calibrate((4, 15), (36, 63))
    assert (words.per_word, words.fixed) == (1.5, 9.0)
    session = Session(0.0, (Turn(69, 1),), prefix=1, prefix_tokens=30)
    text = words.first(session, 3)
    assert len(text.split()) == 40 and text != words.first(session, 4)
    assert text.split()[:20] == words.first(session, 4).split()[:20]
    assert text != Words("other", 9.0, 1.5).first(session, 3), "another run has other words"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"levels": (4.0, 2.0)}, "rise"),
        ({"requests": 0}, "--requests"),
        ({"turns": 0}, "--turns"),
        ({"dataset": Path("x"), "trace": Path("y")}, "--dataset"),
        ({"trace": Path("y"), "turns": 2}, "--turns"),
    ],
)
def test_contradictions(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Job(**{"levels": (1.0,), "is_open": False, "prompt": Lengths(1), "output": Lengths(1), **options})


