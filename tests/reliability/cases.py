"""The cases: each puts a server of its own under one kind of strain and returns figures with their limits."""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from qserve.evals.bench.server_process import ServerProcess
from qserve.runtime.config import EngineConfig
from qserve.runtime.server.config import ServerConfig
from tests.reliability.client import Client, Json, Outcome, percentile
from tests.reliability.load import Load, asker, closed, count, opened
from tests.reliability.misuser import Misuser
from tests.reliability.offline import OfflineProcess

HOST = "127.0.0.1"
ROUNDS = 5  # of ``http``
LIGHT_SHARE = 0.2  # of the peak rate: what the light key of ``fairness`` asks for


@dataclass(frozen=True)
class Options:
    """``requests`` is of ``aborts``; ``seconds`` of every measurement that lasts a given time."""

    model: str
    requests: int = 10_000
    seconds: float = 30.0
    concurrency: int = 32
    load: Load = field(default_factory=Load)
    kv_cache_memory: int = 4 << 20  # small: memory is flat only after all of it was used once

    def engine(self, max_waiting: int = 1024, max_num_seqs: int = 32) -> EngineConfig:
        return EngineConfig(
            max_model_len=512,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=self.kv_cache_memory,
            max_waiting=max_waiting,
        )


@dataclass(frozen=True)
class Figure:
    """A measured value; ``at_most`` and ``at_least`` are its limits, None where it is only told."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def passed(self) -> bool:
        above = self.at_most is not None and not self.value <= self.at_most
        below = self.at_least is not None and not self.value >= self.at_least
        return not above and not below


def aborts(options: Options) -> list[Figure]:
    """Half of the requests leave at a random moment: nothing of them stays, and the others get all they asked for."""
    draw = random.Random(0)
    with ServerProcess(options.model, options.engine(), ServerConfig()) as server:
        client, made, early, memory = Client(HOST, server.port), 0, options.requests // 10, [0]

        async def one() -> Outcome:
            nonlocal made
            made += 1
            if made == early:
                memory[0] = server.state().rss
            leave = draw.random() < 0.5
            return await client.ask(options.load.body(draw), abort_after=draw.uniform(0, 0.5) if leave else None)

        outcomes = asyncio.run(closed(options.concurrency, lambda: made >= options.requests, one))
        idle = server.until_idle(10)
        state = server.state()
    ends = count(outcomes)
    return [
        Figure("requests", len(outcomes)),
        Figure("aborted", ends.get("aborted", 0)),
        Figure("failed", len(outcomes) - ends.get("aborted", 0) - ends.get("done", 0), at_most=0),
        Figure("lost blocks or requests", float(state.lost is not None or not state.idle), at_most=0),
        Figure("seconds to idle", idle, at_most=2.0),
        Figure("RSS growth after the first tenth", state.rss / memory[0] - 1, at_most=0.02),
    ]


def soak(options: Options) -> list[Figure]:
    """Everything that clients do, mixed, for a long time: memory stays as it was, nothing hangs."""
    draw = random.Random(1)
    with ServerProcess(options.model, options.engine(), ServerConfig()) as server:
        client = Client(HOST, server.port)

        async def one() -> Outcome:
            path, body = options.load.mixed(draw)
            return await client.ask(body, path, abort_after=draw.uniform(0, 1) if draw.random() < 0.1 else None)

        def run(seconds: float) -> list[Outcome]:
            end = time.monotonic() + seconds
            return asyncio.run(closed(options.concurrency, lambda: time.monotonic() > end, one))

        warm = run(options.seconds * 0.2)
        server.until_idle(10)
        memory = server.state().rss
        outcomes = warm + run(options.seconds * 0.8)
        idle = server.until_idle(10)
        state = server.state()
    ends = count(outcomes)
    broken = sum(ends.get(end, 0) for end in ("hung", "truncated", "unreachable", "error"))
    return [
        Figure("requests", len(outcomes)),
        Figure("refused", ends.get("refused", 0)),
        Figure("hung, truncated or failed", broken, at_most=0),
        Figure("answers of 5xx", sum(outcome.status >= 500 for outcome in outcomes), at_most=0),
        Figure("lost blocks or requests", float(state.lost is not None or not state.idle), at_most=0),
        Figure("seconds to idle", idle, at_most=2.0),
        Figure("RSS growth after the first fifth", state.rss / memory - 1, at_most=0.02),
    ]


def overload(options: Options) -> list[Figure]:
    """Three times the requests that it can serve: it serves as much as before and refuses the rest quickly."""
    draw = random.Random(2)
    with ServerProcess(options.model, options.engine(max_waiting=64), ServerConfig()) as server:
        one = asker(Client(HOST, server.port), options.load, draw)
        requests, tokens = _peak(options, one)
        began = time.monotonic()
        outcomes = asyncio.run(opened(3 * requests, options.seconds, draw, one))
        elapsed = time.monotonic() - began
    refused = [outcome for outcome in outcomes if outcome.status == 503]
    done = [outcome for outcome in outcomes if outcome.end == "done"]
    goodput = sum(len(outcome.tokens) for outcome in done) / elapsed
    waits = [int(outcome.retry_after or 0) for outcome in refused]
    return [
        Figure("peak tokens/s", tokens),
        Figure("requests/s offered", 3 * requests),
        Figure("goodput over peak", goodput / tokens, at_least=0.9),
        Figure("refused", len(refused)),
        Figure("refusals without a Retry-After of 1..120", sum(not 1 <= wait <= 120 for wait in waits), at_most=0),
        Figure("p99 of a refusal, ms", 1e3 * percentile([o.seconds for o in refused], 99), at_most=50.0),
        Figure("neither done nor refused", len(outcomes) - len(done) - len(refused), at_most=0),
    ]


def fairness(options: Options) -> list[Figure]:
    """One API key asks for ten times as much as another: the other hardly waits longer than alone."""
    draw = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        entries = [
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in ("light", "heavy")
        ]
        path.write_text("\n".join(entries))
        config = ServerConfig(api_keys_file=path)
        with ServerProcess(options.model, options.engine(max_waiting=64), config) as server:
            light, heavy = (
                asker(Client(HOST, server.port, name), options.load, random.Random(name)) for name in ("light", "heavy")
            )
            requests, _ = _peak(options, heavy)
            rate = LIGHT_SHARE * requests

            async def both() -> tuple[list[Outcome], list[Outcome]]:
                crowd = random.Random(4)
                return await asyncio.gather(
                    opened(rate, options.seconds, draw, light), opened(10 * rate, options.seconds, crowd, heavy)
                )

            alone = asyncio.run(opened(rate, options.seconds, draw, light))
            beside, crowd = asyncio.run(both())
    before, after = ([o.ttft for o in outcomes if o.ttft is not None] for outcomes in (alone, beside))
    return [
        Figure("light requests alone", len(alone)),
        Figure("light requests beside", len(beside)),
        Figure("heavy requests beside", len(crowd)),
        Figure("heavy requests refused", sum(outcome.status == 503 for outcome in crowd)),
        Figure("light requests not answered", len(beside) - len(after), at_most=0),
        Figure("p95 TTFT alone, ms", 1e3 * percentile(before, 95)),
        Figure("p95 TTFT beside, ms", 1e3 * percentile(after, 95)),
        Figure("p95 TTFT beside over alone", percentile(after, 95) / max(1e-9, percentile(before, 95)), at_most=2.0),
        Figure("heavy p95 TTFT, ms", 1e3 * percentile([o.ttft for o in crowd if o.ttft is not None], 95)),
    ]


def misuse(options: Options) -> list[Figure]:
    """Every bad input, again and again, beside a stream: each is refused at once, and the stream flows on."""
    body = {"prompt": [5] * 8, "max_tokens": 400, "ignore_eos": True, "temperature": 0.0, "stream": True}
    with ServerProcess(options.model, options.engine(), ServerConfig()) as server, Misuser(server.port) as misuser:
        client = Client(HOST, server.port)

        async def stream(end: float) -> list[float]:
            gaps: list[float] = []
            while time.monotonic() < end:
                gaps += (await client.ask(body)).gaps
            return gaps

        quiet = asyncio.run(stream(time.monotonic() + options.seconds))
        misuser.begin()
        busy = asyncio.run(stream(time.monotonic() + options.seconds))
        abuse = misuser.end()
    return [
        Figure("bad inputs", abuse.sent),
        *(Figure(f"status of: {name}", status, at_least=400, at_most=499) for name, status in abuse.wrong.items()),
        Figure("not answered by a 4xx", len(abuse.wrong), at_most=0),
        Figure("slowest refusal, s", abuse.slowest, at_most=1.0),
        Figure("p99 inter-token latency quiet, ms", 1e3 * percentile(quiet, 99)),
        Figure("p99 beside over quiet", percentile(busy, 99) / max(1e-9, percentile(quiet, 99)), at_most=2.0),
    ]


def http(options: Options) -> list[Figure]:
    """What HTTP adds to 64 streams at once: processor seconds of the server beside those of the same work offline."""
    draw, count_at_once = random.Random(5), 64
    engine = options.engine(max_num_seqs=count_at_once)
    with ServerProcess(options.model, engine, ServerConfig()) as server, OfflineProcess(options.model, engine) as llm:
        client = Client(HOST, server.port)

        async def ask(bodies: list[Json]) -> list[Outcome]:
            return list(await asyncio.gather(*(client.ask(body) for body in bodies)))

        offline, online, bad = [], [], 0
        for _ in range(ROUNDS + 1):
            bodies = [
                options.load.body(draw) | {"max_tokens": options.load.output, "temperature": 0.0}
                for _ in range(count_at_once)
            ]
            seconds, tokens = llm.run(bodies)
            offline.append(seconds / tokens)
            before = server.state().cpu
            bad += sum(outcome.end != "done" for outcome in asyncio.run(ask(bodies)))
            online.append((server.state().cpu - before) / tokens)
    ratios = [b / a for a, b in zip(offline, online)][1:]  # the first round warms both up
    return [
        Figure("streams that failed", bad, at_most=0),
        Figure("offline, processor ms per token", 1e3 * statistics.median(offline[1:])),
        Figure("server, processor ms per token", 1e3 * statistics.median(online[1:])),
        Figure("server over offline, median of the rounds", statistics.median(ratios), at_most=1.1),
    ]


def sigterm(options: Options) -> list[Figure]:
    """SIGTERM under load: who is being served is served to the end, nobody new is, and then nothing is left."""
    with ServerProcess(options.model, options.engine(), ServerConfig()) as server:
        children = server.children()
        outcomes = _during(server, options, lambda: server.signal(signal.SIGTERM))
        ended = server.wait(40)
        code = server.exit_code
        free = _is_free(server.port)
    ends = count(outcomes)
    return [
        Figure("streams that ended whole", ends.get("done", 0), at_least=options.concurrency),
        Figure("truncated, failed or hung", sum(ends.get(e, 0) for e in ("truncated", "error", "hung")), at_most=0),
        Figure("still running", float(not ended), at_most=0),
        Figure("processes left of those that it started", _left(children), at_most=0),
        Figure("exit code", -1 if code is None else code, at_least=0, at_most=0),
        Figure("port not free", float(not free), at_most=0),
    ]


def kill(options: Options) -> list[Figure]:
    """``kill -9`` under load: the port is free at once, and a new server on it works."""
    with ServerProcess(options.model, options.engine(), ServerConfig()) as server:
        children = server.children()
        outcomes = _during(server, options, lambda: server.signal(signal.SIGKILL))
        ended = server.wait(10)
        free = _is_free(server.port)
        with ServerProcess(options.model, options.engine(), ServerConfig(), server.port) as again:
            works = asyncio.run(Client(HOST, again.port).ask(options.load.body(random.Random(0))))
    return [
        Figure("hung", count(outcomes).get("hung", 0), at_most=0),
        Figure("still running", float(not ended), at_most=0),
        Figure("processes left of those that it started", _left(children), at_most=0),
        Figure("port not free", float(not free), at_most=0),
        Figure("the next server does not work", float(works.end != "done"), at_most=0),
    ]


CASES: dict[str, Callable[[Options], list[Figure]]] = {
    case.__name__: case for case in (aborts, soak, overload, fairness, misuse, http, sigterm, kill)
}


def _peak(options: Options, one: Callable[[], object]) -> tuple[float, float]:
    """Requests and output tokens per second of a server that always has enough to do."""
    began = time.monotonic()
    outcomes = asyncio.run(closed(options.concurrency, lambda: time.monotonic() > began + options.seconds, one))  # type: ignore[arg-type]
    seconds = time.monotonic() - began
    done = [outcome for outcome in outcomes if outcome.end == "done"]
    return len(done) / seconds, sum(len(outcome.tokens) for outcome in done) / seconds


def _during(server: ServerProcess, options: Options, act: Callable[[], None]) -> list[Outcome]:
    """Start long streams, act once all of them flow, keep asking, and follow all to their end."""
    client, draw = Client(HOST, server.port), random.Random(4)
    body = options.load.body(draw) | {"max_tokens": 200}

    async def run() -> list[Outcome]:
        streams = [asyncio.ensure_future(client.ask(body)) for _ in range(options.concurrency)]
        while server.state().running < min(options.concurrency, 32):
            await asyncio.sleep(0.01)
        act()
        late = [await client.ask(body) for _ in range(5)]
        return [*await asyncio.gather(*streams), *late]

    return asyncio.run(run())


def _left(processes: list[psutil.Process]) -> int:
    """How many of them still run after a while in which to end."""
    end = time.monotonic() + 10
    while (left := sum(map(_runs, processes))) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
    return True
