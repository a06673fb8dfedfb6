"""``DraftReader``: how far a draft model has read one request, what it guesses, and how often that was right."""

from __future__ import annotations

from collections.abc import Sequence

from qserve.runtime.acceptance import AcceptanceRates
from qserve.runtime.draft_model import DraftModel, Span
from qserve.runtime.drafter import HALVED, LEAST
from qserve.runtime.request import Request

_START = 0.7  # how often guesses are thought to be right before any was made


class DraftReader:
    """How far the draft model has read one request.

    ``num_known``: tokens that had come when it was asked last. ``num_computed``: leading ones whose keys are in its
    cache. ``base``: the position that is the first of its cache. ``guesses``: what follows the known tokens, of which
    all but the last are in the cache, too. ``num_noted``: tokens for which it is known whether the draft model would
    have guessed them; those of the prompt do not count.

    ``everyone``: the rates of all requests, with a kind for each number of guesses before a guess; the last kind for
    all numbers from there on.
    """

    def __init__(self, request: Request, model: DraftModel, everyone: AcceptanceRates) -> None:
        self.request, self.name = request, request.request_id
        self.guesses: list[int] = []
        self.num_known = self.num_computed = self.base = 0
        self.num_noted = request.num_prompt
        self.is_open = False
        self._num_published = 0
        self._model, self._everyone = model, everyone
        self._own = AcceptanceRates(len(everyone.right), HALVED[0])

    @property
    def start(self) -> int:
        """Where it goes on reading: the newest token is always read, for the guess behind it."""
        return min(self.num_computed, self.num_known - 1)

    @property
    def num_unread(self) -> int:
        return self.num_known - self.start

    @property
    def num_unnoted(self) -> int:
        return self.num_known - self.num_noted

    @property
    def can_read(self) -> bool:
        """Whether what it has not read can be read."""
        return self.num_known - self.base <= self._model.max_model_len

    @property
    def num_left(self) -> int:
        return self.request.max_output_tokens - len(self.request.output_token_ids)

    def chances(self, most: int) -> list[tuple[float, int, DraftReader]]:
        """How likely each of up to ``most`` guesses is right, with all before it; and its number, from 1 on."""
        # The last guess takes no position of the cache, and the answer's last token no guess.
        most = min(most, self._model.max_model_len - (self.num_known - self.base) + 1, self.num_left - 1)
        chance, found = 1.0, list[tuple[float, int, DraftReader]]()
        for depth in range(1, most + 1 if self.can_read else 1):
            kind = self._kind(depth - 1)
            chance *= self._own.rate(kind, self._everyone.rate(kind, _START))
            if chance < LEAST:
                break
            found.append((chance, depth, self))
        return found

    def span(self, stop: int, num_guesses: int) -> Span:
        """What there is to read before position ``stop``."""
        return Span(self.name, self.request.tokens(self.start, stop), self.start - self.base, num_guesses)

    def guess_span(self) -> Span:
        """The newest guess."""
        return Span(self.name, (self.guesses[-1],), self.num_known + len(self.guesses) - 1 - self.base, 1)

    def follow(self) -> None:
        """Take in the tokens that came since."""
        right = self._note_what_came()
        self.num_computed += right
        blocks = self._model.blocks
        if self.is_open:
            blocks.truncate(self.name, self.num_computed)
        size, digests = blocks.block_size, self.request.digests
        if not self.is_open:
            self.num_computed = blocks.open(self.name, digests[: (self.num_known - 1) // size])
            self._num_published, self.is_open = self.num_computed // size, True
        full = min(self.num_computed // size, len(digests))
        for index in range(self._num_published, full):
            blocks.publish(self.name, index, digests[index])
        self._num_published = max(self._num_published, full)
        blocks.release_passed(self.name, self.num_computed)

    def took(self, stop: int, found: Sequence[int]) -> None:
        """The tokens before ``stop`` were read, and the last of them followed by what was ``found``."""
        self.num_computed = stop
        self.guesses = []
        for token, guess in zip(range(stop - len(found) + 1, stop + 1), found):
            if token == self.num_known:
                self.guesses = [guess]
            else:
                self._note(token, guess == self.request.tokens(token, token + 1)[0])

    def close(self) -> None:
        """Give up what is in the draft model's cache."""
        if self.is_open:
            self._model.blocks.free(self.name)
        self.is_open, self.guesses, self.num_computed, self.base = False, [], 0, 0

    def _note_what_came(self) -> int:
        """Compare the guesses with the tokens that came since. Returns how many of those in the cache were right."""
        known = self.request.num_prompt + len(self.request.output_token_ids)
        if known == self.num_known:
            return 0
        came, right = self.request.tokens(self.num_known, known), 0
        for guess, token in zip(self.guesses, came):
            self._note(self.num_known + right, guess == token, right)
            if guess != token:
                break
            right += 1
        right = min(right, max(len(self.guesses) - 1, 0))
        self.num_known, self.guesses = known, []
        return right

    def _note(self, token: int, right: bool, depth: int = 0) -> None:
        """``depth``: how many guesses it was behind."""
        if token >= self.num_noted:
            self.num_noted = token + 1
            self._own.note(self._kind(depth), right)
            self._everyone.note(self._kind(depth), right)

    def _kind(self, depth: int) -> int:
        return min(depth, len(self._everyone.right) - 1)
