"""``Sampler``: from logits to tokens. A row's token depends only on that row, its request's history and its seed.

The draw for output number i of a request with seed s is a function of (s, i): it is the same at any load, in any batch,
and after a preemption.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qserve.kernels.row_sampling import RowSampling, draw_rows
from qserve.runtime.device_sampler import sample_rows
from qserve.runtime.request import Request
from qserve.runtime.seen_tokens import SeenTokens

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``logprob`` in nats, under the model before any bias, penalty or temperature; ``rank`` 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token, and the most likely tokens in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class BeamCandidate:
    """A token that may continue a beam. ``logprob`` is taken after the request's changes to the logits; ``logprobs`` is
    what is reported."""

    token_id: int
    logprob: float
    logprobs: TokenLogprobs | None


class Sampled(NamedTuple):
    """``token_id`` is None where the logits held a NaN or no token is allowed: there is nothing to choose.
    ``candidates``: for a beam, the likeliest tokens in order, as many as its search is wide plus one for each token
    that may end it. ``defect``: there is no token because choosing one failed."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    candidates: tuple[BeamCandidate, ...] = ()
    defect: BaseException | None = None


def sample(
    logits: Tensor,
    greedy: Tensor,
    requests: Sequence[Request],
    seeds: Sequence[int],
    allowed: Sequence[Tensor | None] | None = None,
    drafts: Sequence[Sequence[int]] | None = None,
    threads: int | None = None,
) -> list[Sampled]:
    """One token per row. logits float32 [n, vocab], untouched; greedy int32 [n], -1 for a row with a NaN.

    ``allowed``: for each row bool [vocab], the tokens that may be chosen, or None for all. ``drafts``: for each row the
    draft tokens between the request's newest token and the one that the row chooses. Logits on a GPU stay there, see
    ``sample_on_device``.
    """
    best = greedy.tolist()
    masks = allowed or [None] * len(best)
    outputs = outputs_before(requests, drafts)
    if logits.is_cuda:
        return sample_on_device(logits, best, requests, seeds, masks, outputs, threads)
    rows = {
        i: logits[i]  # a row of its own costs more than all else here
        for i, (request, mask) in enumerate(zip(requests, masks, strict=True))
        if not _has_no_token(best[i], mask) and (mask is not None or reads_logits(request))
    }
    chosen = _choose(rows, best, requests, seeds, masks, outputs, threads)
    return [
        chosen[i] if i in chosen else Sampled(None if _has_no_token(token, mask) else token)
        for i, (token, mask) in enumerate(zip(best, masks))
    ]


def outputs_before(requests: Sequence[Request], drafts: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """For each row, the outputs of its request before the token that it chooses, draft tokens included."""
    if drafts is None:
        return [request.output_token_ids for request in requests]
    return [
        [*request.output_token_ids, *draft] if draft else request.output_token_ids
        for request, draft in zip(requests, drafts, strict=True)
    ]


def sample_on_device(
    logits: Tensor, best: Sequence[int], requests: Sequence[Request], seeds: Sequence[int],
    masks: Sequence[Tensor | None], outputs: Sequence[list[int]], threads: int | None = None,
) -> list[Sampled]:  # fmt: skip
    """``sample`` where fetching a row costs more than drawing from it. Tokens are drawn on the device of the logits.
    Only rows that are changed first, or whose log-probabilities are wanted, are fetched."""
    draws: list[tuple[int, RowSampling]] = []
    wanted: list[int] = []
    for i, (request, mask) in enumerate(zip(requests, masks, strict=True)):
        params = request.params
        if _has_no_token(best[i], mask):
            continue
        if mask is not None or params.use_beam_search or _adjusts(request):
            wanted.append(i)
            continue
        if not params.greedy:
            draws.append((i, row_sampling(request, seeds[i], len(outputs[i]))))
        if params.logprobs is not None:
            wanted.append(i)
    rows = torch.empty(len(wanted), logits.shape[1], pin_memory=logits.is_cuda)
    for row, i in zip(rows, wanted):
        row.copy_(logits[i], non_blocking=True)
    there = dict(zip((i for i, _ in draws), sample_rows(logits, draws).tolist()))
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    here = dict(zip(wanted, rows))
    changed = {
        i: row for i, row in here.items()
        if masks[i] is not None or requests[i].params.use_beam_search or _adjusts(requests[i])
    }
    chosen = _choose(changed, best, requests, seeds, masks, outputs, threads)

    def sampled(i: int) -> Sampled:
        token, count = there.get(i, best[i]), requests[i].params.logprobs
        return Sampled(token, None if count is None else _logprobs(here[i], token, count))

    return [
        Sampled(None) if _has_no_token(best[i], masks[i]) else chosen[i] if i in chosen else _alone(sampled, i)
        for i in range(len(best))
    ]


def prompt_logprobs(rows: Tensor, following: Sequence[int], count: int) -> list[TokenLogprobs]:
    """rows float32 [n, vocab] log-probabilities; following: the prompt's token after each of the n positions."""
    if not following:
        return []
    rows = rows[: len(following)]
    chosen = rows.gather(1, torch.tensor(following)[:, None])
    ranks = (rows > chosen).sum(1) + 1
    top, ids = rows.topk(min(count, rows.shape[1]))
    return [
        TokenLogprobs(TokenLogprob(*of_chosen), tuple(map(TokenLogprob, tokens, values, itertools.count(1))))
        for of_chosen, tokens, values in zip(
            zip(following, chosen[:, 0].tolist(), ranks.tolist()), ids.tolist(), top.tolist()
        )
    ]


def reads_logits(request: Request) -> bool:
    """Whether more than the largest value of its next row may matter."""
    params = request.params
    return not (params.greedy and params.logprobs is None and chooses_as_it_is(request))


def chooses_as_it_is(request: Request) -> bool:
    """Whether its next token is the largest of its row, or drawn from the row as it is."""
    return not request.params.use_beam_search and not _adjusts(request)


def with_logprobs(row: Tensor, token: int, request: Request) -> Sampled:
    """``token``, chosen from ``row``, with the log-probabilities that its request wants."""
    return _alone(_told, row, token, request)


def row_sampling(request: Request, seed: int, index: int) -> RowSampling:
    """The draw for its output number ``index``."""
    params = request.params
    return RowSampling(uniform(seed, index), params.temperature, params.top_k, params.top_p, params.min_p)


def _adjusts(request: Request) -> bool:
    """Whether a bias, a penalty, a cut of its logits or a token that may not come changes its next row."""
    params = request.params
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    cut = params.top_n_sigma and not params.greedy
    masked = params.allowed_token_ids or request.bad_words or len(request.output_token_ids) < params.min_tokens
    return bool(params.biases or penalties or cut or masked)


def _has_no_token(best: int, allowed: Tensor | None) -> bool:
    """Whether there is nothing to choose: the row holds a NaN, or no token is allowed."""
    return best < 0 or (allowed is not None and not allowed.any())


def _alone(work: Callable[..., _T], *arguments: Any) -> _T | Sampled:
    """What fails on a row is that row's alone."""
    try:
        return work(*arguments)
    except Exception as error:
        return Sampled(None, defect=error)


def _choose(
    rows: Mapping[int, Tensor], best: Sequence[int], requests: Sequence[Request], seeds: Sequence[int],
    masks: Sequence[Tensor | None], outputs: Sequence[list[int]], threads: int | None,
) -> dict[int, Sampled]:  # fmt: skip
    """The tokens of ``rows``, each float32 [vocab] under its number. All that are drawn are drawn together."""
    found: dict[int, Sampled] = {}
    drawn: dict[int, Tensor] = {}
    for i, row in rows.items():
        first = _alone(_unless_drawn, row, best[i], requests[i], masks[i], outputs[i])
        if isinstance(first, Sampled):
            found[i] = first
        else:
            drawn[i] = first
    draws = [row_sampling(requests[i], seeds[i], len(outputs[i])) for i in drawn]
    for i, token in zip(drawn, draw_rows(list(drawn.values()), draws, threads=threads)):
        found[i] = with_logprobs(rows[i], token, requests[i])
    return found


def _unless_drawn(
    row: Tensor, best: int, request: Request, allowed: Tensor | None, outputs: list[int]
) -> Sampled | Tensor:
    """What is chosen, or the changed row from which it is to be drawn."""
    params = request.params
    adjusted = _adjust(row, request, allowed, outputs)
    if adjusted is not row and adjusted.max() == -torch.inf:
        return Sampled(None)
    if params.use_beam_search:
        return Sampled(best, candidates=_candidates(row, adjusted, request))
    if params.greedy:
        return _told(row, best if adjusted is row else int(adjusted.argmax()), request)
    return adjusted


def _told(row: Tensor, token: int, request: Request) -> Sampled:
    count = request.params.logprobs
    return Sampled(token, None if count is None else _logprobs(row, token, count))


def _adjust(row: Tensor, request: Request, allowed: Tensor | None, outputs: list[int]) -> Tensor:
    """The row with biases, penalties, tokens that may not come, and ``top_n_sigma`` applied, in this order; without any
    of these the row itself."""
    params = request.params
    if params.biases:
        tokens, biases = zip(*params.biases)
        row = row.index_add(0, torch.tensor(tokens), torch.tensor(biases))
    if params.repetition_penalty != 1.0:
        seen, _ = _seen(request, outputs, prompt=True)
        picked = row[seen]
        factor = params.repetition_penalty
        row = row.index_copy(0, seen, torch.where(picked > 0, picked / factor, picked * factor))
    if outputs and (params.presence_penalty or params.frequency_penalty):
        came, counts = _seen(request, outputs, prompt=False)
        row = row.index_add(0, came, -(params.presence_penalty + params.frequency_penalty * counts))
    if allowed is not None:
        row = row.masked_fill(~_without_endings(allowed, request, len(outputs) < params.min_tokens), -torch.inf)
    elif len(outputs) < params.min_tokens:
        row = row.index_fill(0, _indices(request.endings, len(row)), -torch.inf)
    if params.allowed_token_ids is not None:
        kept = _index(tuple(params.allowed_token_ids))
        row = torch.full_like(row, -torch.inf).index_copy_(0, kept, row[kept])
    if forbidden := _ends_of(request.bad_words, outputs):
        row = row.index_fill(0, _indices(forbidden, len(row)), -torch.inf)
    if params.top_n_sigma and not params.greedy:
        sigma = row[row > -torch.inf].double().std(correction=0)  # of the tokens that can come at all
        row = row.masked_fill(row < row.max() - params.top_n_sigma * sigma, -torch.inf)
    return row


def _seen(request: Request, outputs: Sequence[int], *, prompt: bool) -> tuple[Tensor, Tensor]:
    """Each token of ``outputs`` once, and how often it came; ``prompt``: with those of the prompt. ``outputs`` are the
    request's and, behind them, those of a draft."""
    if prompt not in request.seen:
        request.seen[prompt] = SeenTokens(request.prompt_token_ids if prompt else ())
    known = request.output_token_ids
    found: tuple[Tensor, Tensor] = request.seen[prompt].with_outputs(known, outputs[len(known) :])
    return found


def _candidates(row: Tensor, adjusted: Tensor, request: Request) -> tuple[BeamCandidate, ...]:
    count = request.params.logprobs
    values, tokens = adjusted.log_softmax(-1).topk(min(request.params.n + len(request.endings), len(row)))
    return tuple(
        BeamCandidate(token, value, None if count is None else _logprobs(row, token, count))
        for token, value in zip(tokens.tolist(), values.tolist())
        if value > -torch.inf
    )


def _without_endings(allowed: Tensor, request: Request, early: bool) -> Tensor:
    """``allowed`` without the endings that the request ignores, or, where it is ``early``, without any ending; but
    unchanged where nothing else would be left."""
    endings = [
        *(request.params.stop_token_ids if early else ()),
        *(request.eos_token_ids if early or request.params.ignore_eos else ()),
    ]
    if not endings:
        return allowed
    kept = allowed.index_fill(0, _indices(endings, len(allowed)), False)
    return kept if kept.any() else allowed


def _ends_of(words: Iterable[tuple[int, ...]], outputs: list[int]) -> list[int]:
    """The last tokens of ``words`` whose other tokens are those that came last."""
    return [word[-1] for word in words if len(word) == 1 or tuple(outputs[1 - len(word) :]) == word[:-1]]


@lru_cache(maxsize=256)
def _index(tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def _indices(tokens: Iterable[int], vocab_size: int) -> Tensor:
    return torch.tensor([token for token in tokens if token < vocab_size], dtype=torch.int64)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the output's index alone."""
    digest = blake2b(seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    values = row.log_softmax(-1)
    chosen = TokenLogprob(token, float(values[token]), int((values > values[token]).sum()) + 1)
    top, ids = values.topk(min(count, len(row))) if count else (values[:0], torch.empty(0, dtype=torch.int64))
    ranked = enumerate(zip(ids.tolist(), top.tolist()), start=1)
    return TokenLogprobs(chosen, tuple(TokenLogprob(i, value, rank) for rank, (i, value) in ranked))
