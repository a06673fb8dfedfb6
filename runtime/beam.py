"""``BeamSearch``: which outputs of a request go on, and which are the best at the end.

The score of an output is the sum of its tokens' log-probabilities divided by ``tokens ** length_penalty``. In each
round all continuations of all beams are ranked by their sums. In that order, those that end are set aside and the
others go on, until as many go on as the search is wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qserve.runtime.sampler import BeamCandidate, TokenLogprobs
from qserve.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Beam:
    """An output and the sum of its log-probabilities. ``stop_token`` is set if a token, not the length, ended it."""

    token_ids: tuple[int, ...] = ()
    total: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_token: int | None = None

    def then(self, next_token: BeamCandidate) -> Beam:
        more = () if next_token.logprobs is None else (next_token.logprobs,)
        tokens = (*self.token_ids, next_token.token_id)
        return Beam(tokens, self.total + next_token.logprob, (*self.logprobs, *more))

    def score(self, length_penalty: float) -> float:
        return _score(self.total, len(self.token_ids), length_penalty)


@dataclass(frozen=True)
class Round:
    """The next state of the beams: tokens for those that go on, forks of the same parents, and those that end.

    ``forks`` are further beams beside the one that keeps the parent's name. Without tokens the search is over.
    """

    tokens: dict[str, int]
    forks: list[tuple[str, Beam]]
    ended: list[str]


@dataclass
class BeamSearch:
    """The search of one request.

    Attributes:
        params: ``n`` is the width.
        endings: tokens that end an output, once ``params.min_tokens`` came before.
        max_tokens: of an output.
        beams: live outputs, by name. The caller of ``advance`` adds the forks, with names of their own.
        finished: the best outputs that ended, the best first, ``n`` at most; all ``n`` when the search is over.
    """

    params: SamplingParams
    endings: frozenset[int]
    max_tokens: int
    beams: dict[str, Beam]
    finished: list[Beam] = field(default_factory=list)

    def advance(self, candidates: Mapping[str, Sequence[BeamCandidate]]) -> Round:
        """Take the likeliest next tokens of every beam, at least ``n`` and one for each ending."""
        first: dict[str, Beam] = {}
        forks: list[tuple[str, Beam]] = []
        for parent, beam in self._choose(candidates):
            if parent in first:
                forks.append((parent, beam))
            else:
                first[parent] = beam
        ended = [name for name in self.beams if name not in first]
        self.beams = first
        return Round({name: beam.token_ids[-1] for name, beam in first.items()}, forks, ended)

    def _choose(self, candidates: Mapping[str, Sequence[BeamCandidate]]) -> list[tuple[str, Beam]]:
        """The beams that go on, each with the name of the beam that it continues."""
        ranked = sorted(
            ((name, candidate) for name in self.beams for candidate in candidates[name]),
            key=lambda pair: -(self.beams[pair[0]].total + pair[1].logprob),  # of equals the earlier beam comes first
        )
        going: list[tuple[str, Beam]] = []
        for name, candidate in ranked:
            if len(going) == self.params.n:
                break
            beam = self.beams[name].then(candidate)
            if candidate.token_id in self.endings and len(beam.token_ids) > self.params.min_tokens:
                self._finish(replace(beam, stop_token=candidate.token_id))
            else:
                going.append((name, beam))
        if len(going[0][1].token_ids) == self.max_tokens:
            for _, beam in going:
                self._finish(beam)
            return []
        return [] if self._is_settled(going[0][1]) else going

    def _finish(self, beam: Beam) -> None:
        self.finished.append(beam)
        self.finished.sort(key=lambda each: -each.score(self.params.length_penalty))
        del self.finished[self.params.n :]

    def _is_settled(self, likeliest: Beam) -> bool:
        """Whether no output that may still come is wanted."""
        if len(self.finished) < self.params.n or self.params.early_stopping:
            return len(self.finished) == self.params.n
        # A sum can only fall, and its score is best at one end of the lengths that are left.
        penalty, lengths = self.params.length_penalty, (len(likeliest.token_ids) + 1, self.max_tokens)
        return self.finished[-1].score(penalty) >= max(_score(likeliest.total, n, penalty) for n in lengths)


def _score(total: float, length: int, length_penalty: float) -> float:
    return float(total / length**length_penalty)
