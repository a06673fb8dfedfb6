"""``Load``: the requests of a measurement's clients, random but the same each time, and their rhythm."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.reliability.client import Client, Json, Outcome

# About a token each. Prompts of random tokens are answered by random bytes, and halves of characters are not shown.
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog")


@dataclass(frozen=True)
class Load:
    """Streams of completions. Prompts have 1 to ``prompt`` words, answers 1 to ``output`` tokens."""

    prompt: int = 64
    output: int = 64

    def body(self, draw: random.Random) -> Json:
        return {
            "prompt": " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, self.prompt))),
            "max_tokens": draw.randint(1, self.output),
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": draw.randrange(2**31),
            "stream": True,
        }

    def mixed(self, draw: random.Random) -> tuple[str, Json]:
        """Any of the things that clients do: (path, body)."""
        body = self.body(draw) | {"stream": draw.random() < 0.7}
        kind = draw.choice(("plain", "plain", "choices", "logprobs", "chat", "stop", "bad"))
        match kind:
            case "choices":
                body |= {"n": draw.randint(2, 4)}
            case "logprobs":
                body |= {"logprobs": 5, "echo": draw.random() < 0.5}
            case "stop":
                body |= {"stop": ["a", "e "], "temperature": 0.0, "frequency_penalty": 0.5}
            case "bad":
                body |= draw.choice(({"temperature": -1}, {"max_tokens": 0}, {"prompt": [-1]}, {"unknown": 1}))
            case "chat":
                content = "the quick brown fox " * draw.randint(1, 5)
                body["messages"] = [{"role": "user", "content": content}]
                del body["prompt"]
        return ("/v1/chat/completions" if kind == "chat" else "/v1/completions"), body


async def closed(workers: int, until: Callable[[], bool], one: Callable[[], Awaitable[Outcome]]) -> list[Outcome]:
    """So many clients at once, each asking again as soon as it has its answer, until ``until()``."""
    outcomes: list[Outcome] = []

    async def work() -> None:
        while not until():
            outcomes.append(await one())

    await asyncio.gather(*(work() for _ in range(workers)))
    return outcomes


async def opened(
    rate: float, seconds: float, draw: random.Random, one: Callable[[], Awaitable[Outcome]]
) -> list[Outcome]:
    """Requests as a Poisson process of ``rate`` per second, however long the answers take; waits for all of them."""
    tasks: list[asyncio.Task[Outcome]] = []
    began = now = time.monotonic()
    while (now := now + draw.expovariate(rate)) < began + seconds:
        await asyncio.sleep(max(0.0, now - time.monotonic()))
        tasks.append(asyncio.ensure_future(one()))
    return list(await asyncio.gather(*tasks))


def count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many ended in which way."""
    ends = [outcome.end for outcome in outcomes]
    return {end: ends.count(end) for end in sorted(set(ends))}


def asker(client: Client, load: Load, draw: random.Random) -> Callable[[], Awaitable[Outcome]]:
    return lambda: client.ask(load.body(draw))
