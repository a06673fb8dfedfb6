"""``Drafter``: guesses which tokens come next, and how many guesses are worth a step's time.

Knows requests and the time of steps; does not know the model, the scheduler or text. A guess never changes an answer:
it decides how many steps the answer takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from qserve.runtime.acceptance import AcceptanceRates
from qserve.runtime.ngrams import NGramIndex
from qserve.runtime.request import Request
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.step_costs import StepCosts

MAX_PROMPT = 1 << 15  # of a longer prompt only the end is indexed
MAX_TENANTS = 64
MAX_CACHED_TOKENS = 1 << 16  # of a tenant's recent answers
MARGIN = 1.03  # what drafts must promise to gain
LEAST = 0.02  # a guess less likely than this is no guess
HALVED = 32, 1024  # guesses after which those before count half: of one request, of all
_NEW, _DOUBT = 0.4, 4.0  # how much of others' luck a new request is given, and how many right guesses that weighs


class Drafter(Protocol):
    """What an engine asks before each step."""

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        """Guesses, by ``request_id``, of what follows the tokens of decoding ``requests``. All decode in one step. A
        request that is left out gets no draft."""
        ...

    def expects(self, requests: Sequence[Request]) -> bool:
        """Whether there will be drafts once the tokens in flight of decoding ``requests`` are known, so that it pays to
        wait for them."""
        ...

    def timed(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` tokens, all of them decoded, took so long."""
        ...


class NGramDrafter:
    """Drafts what followed the newest tokens where they came before.

    Where a match goes on, its next token is a guess, whether or not it is drafted. So it is known for each request how
    often guesses behind matches of each length are right, without the cost of trying. ``max_rows`` of a step.
    """

    def __init__(self, config: SpeculativeConfig, max_rows: int) -> None:
        self._config = config
        self._max_rows = max_rows
        self._costs = StepCosts(max_rows)
        self._everyone = AcceptanceRates(config.prompt_lookup_max + 1, HALVED[1])
        self._readers: dict[str, _Reader] = {}
        self._answers: dict[tuple[str, str], _Answers] = {}  # by tenant and salt, the one used last at the end

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        return {name: self._readers[name].guess(count) for name, count in self._plan(requests).items()}

    def expects(self, requests: Sequence[Request]) -> bool:
        return bool(self._plan(requests))

    def timed(self, rows: int, seconds: float) -> None:
        self._costs.add(rows, seconds)

    def _plan(self, requests: Sequence[Request]) -> dict[str, int]:
        """How many tokens to guess of each request, so that the most tokens come in a second."""
        rows = len(requests)
        room = self._max_rows - rows
        if not rows or room <= 0 or not self._costs.knows(rows):
            return {}
        seconds = self._costs.table()
        needed = MARGIN * rows / seconds[rows]  # tokens in a second
        if all(count < needed * seconds[count] for count in range(rows + 1, self._max_rows + 1)):
            return {}  # not even right guesses pay
        self._drop_ended(rows)
        most = min(room, self._config.num_speculative_tokens)
        chances: list[tuple[float, str]] = []
        for request in requests:
            chances += self._read(request).chances(most)
        chances.sort(key=_likelihood, reverse=True)  # of one request a later guess is never more likely
        tokens, best, taken = float(rows), needed, 0
        for count, (chance, _) in enumerate(chances[:room], 1):
            tokens += chance
            if tokens > best * seconds[rows + count]:
                best, taken = tokens / seconds[rows + count], count
        counts: dict[str, int] = {}
        for _, request_id in chances[:taken]:
            counts[request_id] = counts.get(request_id, 0) + 1
        return counts

    def _read(self, request: Request) -> _Reader:
        reader = self._readers.get(request.request_id)
        if reader is None or reader.request is not request:
            if reader is not None:
                self._drop(reader)
            answers = self._answers_to(request) if self._config.method == "suffix" else None
            reader = self._readers[request.request_id] = _Reader(request, self._config, self._everyone, answers)
        reader.read()
        return reader

    def _answers_to(self, request: Request) -> _Answers:
        key = request.tenant, request.cache_salt
        answers = self._answers.pop(key, None) or _Answers(self._config)
        self._answers[key] = answers
        if len(self._answers) > MAX_TENANTS:
            del self._answers[next(iter(self._answers))]
        return answers

    def _drop_ended(self, rows: int) -> None:
        if len(self._readers) <= rows:
            return
        for reader in list(self._readers.values()):
            if reader.request.is_finished:
                self._drop(reader)

    def _drop(self, reader: _Reader) -> None:
        """Forget a request that has ended, except for its answer."""
        del self._readers[reader.request.request_id]
        if reader.answers is not None:
            reader.answers.add(reader.request.output_token_ids)


def _likelihood(chance: tuple[float, str]) -> float:
    return chance[0]


class _Trust:
    """How likely a guess for one request is right. What is known of all requests counts for a new one only in part, and
    more as its guesses turn out as those of others did. To begin with little costs little: guesses are counted whether
    or not they are drafted.
    """

    def __init__(self, longest: int, everyone: AcceptanceRates) -> None:
        self._own, self._everyone, self._longest = AcceptanceRates(longest + 1, HALVED[0]), everyone, longest
        self._right = self._expected = 0.0

    def note(self, length: int, right: bool) -> None:
        self._expected += self._usual(length)
        self._right += right
        if self._expected >= HALVED[0]:
            self._right, self._expected = self._right / 2, self._expected / 2
        self._own.note(length, right)
        self._everyone.note(length, right)

    def rate(self, length: int) -> float:
        likeness = (self._right + _NEW * _DOUBT) / (self._expected + _DOUBT)
        return self._own.rate(length, min(likeness, 1.0) * self._usual(length))

    def _usual(self, length: int) -> float:
        """The rate of all requests. Before anything is known: the longer a match, the likelier it goes on."""
        return self._everyone.rate(length, 0.3 + 0.6 * length / self._longest)


class _Answers:
    """Recent answers of one tenant and salt, in two halves: the older is dropped when the newer is full."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._count = 0
        self.halves: deque[NGramIndex] = deque([self._empty()], 2)

    def add(self, answer: Sequence[int]) -> None:
        half = self._config.suffix_decoding_max_cached_requests // 2 + 1
        if self._count == half or len(self.halves[0].tokens) > MAX_CACHED_TOKENS // 2:
            self.halves.appendleft(self._empty())
            self._count = 0
        self._count += 1
        self.halves[0].extend([*answer[-MAX_CACHED_TOKENS // 2 :], -1])  # which nothing matches and nobody guesses

    def _empty(self) -> NGramIndex:
        return NGramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)


class _Reader:
    """Follows one request. ``_at``: the place in ``_source`` of the next guess, behind a match of ``_length`` tokens.

    Behind a long match one wrong guess may be a word that was replaced. The text behind it is then tried as a match of
    no token.
    """

    def __init__(
        self, request: Request, config: SpeculativeConfig, everyone: AcceptanceRates, answers: _Answers | None
    ) -> None:
        self.request = request
        self.answers = answers
        self._longest = config.prompt_lookup_max
        self._text = NGramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._text.extend(request.prompt_token_ids[-MAX_PROMPT:])
        self._trust = _Trust(self._longest, everyone)
        self._num_read = 0
        self._source: NGramIndex | None = None
        self._at = self._length = 0
        self._find()

    def read(self) -> None:
        """Take in the tokens that came since."""
        outputs = self.request.output_token_ids
        for token in outputs[self._num_read :]:
            self._take(token)
        self._num_read = len(outputs)

    def chances(self, most: int) -> list[tuple[float, str]]:
        """How likely each of up to ``most`` further guesses is right, with all before it."""
        if self._source is None:
            return []
        chance, found, rate, name = 1.0, [], self._trust.rate, self.request.request_id
        for length in range(self._length, self._length + most):
            chance *= rate(min(length, self._longest))
            if chance < LEAST:
                break
            found.append((chance, name))
        return found

    def guess(self, count: int) -> list[int]:
        """The next ``count`` tokens, as far as they can be guessed. A text that repeats itself goes on repeating."""
        assert self._source is not None, "there is nothing to guess from"
        guess = self._source.tokens[self._at : self._at + count]
        if self._source is self._text:
            period = len(self._text.tokens) - self._at
            while len(guess) < count:
                guess.append(guess[-period])
        return guess[: guess.index(-1)] if -1 in guess else guess

    def _take(self, token: int) -> None:
        source, resumed = self._source, False
        if source is not None:
            right = source.tokens[self._at] == token
            self._trust.note(self._length, right)
            resumed = not right and self._length >= self._longest // 2
            self._at += 1
            self._length = min(self._length + 1, self._longest) if right else 0
            if not (right or resumed):
                self._source = None
        self._text.extend((token,))
        if self._source is not None and self._at >= len(self._source.tokens):
            self._source, self._length = None, 0
        if self._source is None or resumed:
            self._find()

    def _find(self) -> None:
        """Look for a match; without one, a guess that is being followed stays."""
        text = self._text.tokens
        for index in (self._text, *(self.answers.halves if self.answers else ())):
            at, length = index.find(text)
            if length > self._length and at < len(index.tokens):
                self._source, self._at, self._length = index, at, length
