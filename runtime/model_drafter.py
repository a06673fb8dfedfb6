"""``ModelDrafter``: drafts of a ``DraftModel``: for whom, how many, and what was right.

Each guess but the first takes a step of the draft model, over all sequences that want one. So the number of guesses
follows from two measured times, that of the target's steps and that of the draft model's, and from the rate at which
guesses for this request were right. Where the draft model reads tokens that came meanwhile, it is also asked what it
would have guessed: so its rate is known of text for which nothing was drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from qserve.runtime.acceptance import AcceptanceRates
from qserve.runtime.draft_model import DraftModel, Span
from qserve.runtime.draft_reader import DraftReader
from qserve.runtime.drafter import HALVED, MARGIN
from qserve.runtime.request import Request
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.step_costs import Pace, StepCosts

_LAG = 8  # unread tokens up to which reading is part of drafting; beyond them it must pay for itself
_HORIZON = 64  # tokens of the answer in which it must
_TRIED = 0.01  # share of the time of steps that may go into finding out whether drafts would pay by now
_PROBE = 32  # tokens of an answer that are read for that, at least


class ModelDrafter:
    """Drafts for a target whose steps have up to ``max_rows`` rows of logits over ``vocab_size`` tokens."""

    def __init__(
        self, model: DraftModel, config: SpeculativeConfig, max_rows: int, vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.model = model
        self._most = config.num_speculative_tokens
        self._max_rows = max_rows
        self._tokens = min(vocab_size, model.vocab_size)  # that both models know
        self._clock = clock
        pace = Pace()
        self._costs, self._draft_costs = StepCosts(max_rows, pace), StepCosts(model.max_tokens, pace)
        self._everyone = AcceptanceRates(1, HALVED[1])
        self._readers: dict[str, DraftReader] = {}  # the one used last at the end
        self._credit = 0.0  # seconds

    def expects(self, requests: Sequence[Request]) -> bool:
        return bool(self._plan(requests)[0])

    def timed(self, rows: int, seconds: float) -> None:
        self._costs.add(rows, seconds)
        self._credit += _TRIED * seconds

    def draft(self, requests: Sequence[Request]) -> Mapping[str, Sequence[int]]:
        counts, gain, pays = self._plan(requests)
        wanted = {
            reader: count
            for reader, count in counts.items()
            if reader.num_unread <= _LAG
            or self._seconds_to_read(reader) <= gain / len(counts) * min(reader.num_left, _HORIZON)
        }
        if pays and not wanted and (reader := self._to_probe(requests)):
            wanted[reader] = 0
        ready = {reader: wanted[reader] for reader in self._read(wanted) if wanted[reader]}
        for depth in range(1, max(ready.values(), default=0)):
            more = [reader for reader, count in ready.items() if count > depth and self._is_known(reader.guesses[-1])]
            if not more:
                break
            for reader, (guess,) in zip(more, self._run([each.guess_span() for each in more])):
                reader.guesses.append(guess)
        drafts = {}
        for reader in ready:
            while reader.guesses and not self._is_known(reader.guesses[-1]):
                reader.guesses.pop()
            drafts[reader.name] = list(reader.guesses)
        return drafts

    def check(self) -> None:
        """Raise ``AssertionError`` unless the draft model's tables are those of the readers."""
        self.model.blocks.check()
        assert self.model.blocks.tables().keys() == {name for name, each in self._readers.items() if each.is_open}
        for reader in self._readers.values():
            assert 0 <= reader.base <= reader.num_computed <= reader.num_known
            assert reader.is_open or not reader.num_computed

    def _plan(self, requests: Sequence[Request]) -> tuple[dict[DraftReader, int], float, bool]:
        """How many guesses to make for whom, so that the most tokens come in a second; the seconds that this saves;
        and whether drafts could pay at all, if they were right."""
        rows = len(requests)
        room = self._max_rows - rows
        if not rows or room <= 0 or not self._costs.knows(rows):
            return {}, 0.0, False
        seconds, reading = self._costs.table(), self._reading_seconds()
        plain = rows / seconds[rows]  # tokens in a second
        needed = MARGIN * plain
        if all(
            rows + more < needed * (seconds[rows + more] + reading[1] * -(-more // rows)) for more in range(1, room + 1)
        ):
            return {}, 0.0, False
        self._drop_ended()
        chances = []
        for request in requests:
            reader = self._follow(request)
            chances += reader.chances(min(room, self._most))
        chances.sort(key=_likelihood, reverse=True)  # of one request a later guess is never more likely
        tokens, drafting, asked = float(rows), 0.0, [0] * (self._most + 1)
        best, saved, taken = needed, 0.0, 0
        for count, (chance, depth, reader) in enumerate(chances[:room], 1):
            tokens += chance
            before = asked[depth]
            read = reader.num_unread if depth == 1 and reader.num_unread <= _LAG else 1
            asked[depth] = min(before + read, self.model.max_tokens)
            drafting += reading[asked[depth]] - reading[before]
            step = seconds[rows + count] + drafting
            if tokens > best * step:
                best, saved, taken = tokens / step, tokens / plain - step, count
        counts: dict[DraftReader, int] = {}
        for _, _, reader in chances[:taken]:
            counts[reader] = counts.get(reader, 0) + 1
        return counts, saved, True

    def _read(self, wanted: Iterable[DraftReader]) -> list[DraftReader]:
        """Have the tokens read that the draft model does not know yet, as many as one step allows. Returns those of
        ``wanted`` that know all of them now; each has a first guess."""
        wanted = list(wanted)
        tokens, guesses = self.model.max_tokens, self.model.max_guesses - len(wanted)
        spans, reading = [], []
        for reader in wanted:
            start = reader.start
            stop = min(reader.num_known, start + tokens)
            known = reader.request.tokens(start, stop)
            if start == stop or max(known) >= self.model.vocab_size or not self._reserve(reader, stop, wanted):
                continue
            is_last = stop == reader.num_known  # and a guess of what follows it is what all this is for
            asked = max(0, min(stop - max(start, reader.num_noted - 1), guesses + is_last))
            guesses -= asked - is_last
            tokens -= stop - start
            spans.append(reader.span(stop, asked))
            reading.append(reader)
        if not spans:
            return []
        for reader, span, found in zip(reading, spans, self._run(spans)):
            reader.took(reader.start + len(span.token_ids), found)
        return [reader for reader in reading if reader.guesses]

    def _reserve(self, reader: DraftReader, stop: int, wanted: Sequence[DraftReader]) -> bool:
        """Make room for the tokens up to ``stop`` and for the guesses behind them, if need be that of sequences which
        are not ``wanted``, the one used longest ago first."""
        others = (each for each in list(self._readers.values()) if each.is_open and each not in wanted)
        end = min(stop - reader.base + self._most - 1, self.model.max_model_len)
        while not self.model.reserve(reader.name, reader.start - reader.base, end):
            if (other := next(others, None)) is None:
                return False
            other.close()
        return True

    def _run(self, spans: Sequence[Span]) -> list[list[int]]:
        began = self._clock()
        found = self.model.run(spans)
        self._draft_costs.add(sum(len(span.token_ids) for span in spans), self._clock() - began)
        return found

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._tokens

    def _reading_seconds(self) -> list[float]:
        """The seconds that the draft model takes for each number of tokens. What was never measured is thought to cost
        nothing, so that it is measured."""
        if not self._draft_costs.is_known:
            return [0.0] * (self.model.max_tokens + 1)
        return [0.0, *self._draft_costs.table()[1:]]

    def _seconds_to_read(self, reader: DraftReader) -> float:
        most, seconds = self.model.max_tokens, self._reading_seconds()
        return seconds[min(reader.num_unread, most)] * max(1.0, reader.num_unread / most)

    def _to_probe(self, requests: Sequence[Request]) -> DraftReader | None:
        """The request that tells at least cost whether drafts would be right by now, if that much time may be lost."""
        readers = [self._readers[each.request_id] for each in requests]
        fit = [each for each in readers if each.num_unnoted >= _PROBE and each.can_read]
        reader = min(fit, key=_unread, default=None)
        if reader is None or self._seconds_to_read(reader) * self._costs.pace.value > self._credit:
            return None
        self._credit = 0.0
        return reader

    def _follow(self, request: Request) -> DraftReader:
        reader = self._readers.pop(request.request_id, None)
        if reader is None or reader.request is not request:
            if reader is not None:
                reader.close()
            reader = self._reader(request)
        self._readers[request.request_id] = reader
        reader.follow()
        return reader

    def _reader(self, request: Request) -> DraftReader:
        return DraftReader(request, self.model, self._everyone)

    def _drop_ended(self) -> None:
        for name, reader in list(self._readers.items()):
            if reader.request.is_finished:
                reader.close()
                del self._readers[name]


def _likelihood(chance: tuple[float, int, DraftReader]) -> float:
    return chance[0]


def _unread(reader: DraftReader) -> int:
    return reader.num_unread
