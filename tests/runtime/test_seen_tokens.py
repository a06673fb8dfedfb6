"""Tokens counted as they come: the same as counting them all again, drafts included, and the prompt is read once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qserve.runtime.request import Request
from qserve.runtime.sampler import sample
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.seen_tokens import SeenTokens

TOKENS = st.lists(st.integers(0, 300), max_size=200)


@given(TOKENS, st.lists(st.tuples(TOKENS, TOKENS), max_size=4))
def test_they_are_counted_as_if_at_once(prompt: list[int], steps: list[tuple[list[int], list[int]]]) -> None:
    seen, outputs = SeenTokens(prompt), []
    for more, draft in steps:
        outputs += more
        for drafted in (draft, []):
            tokens, counts = seen.with_outputs(outputs, drafted)
            found = dict(zip(tokens.tolist(), counts.tolist(), strict=True))
            assert len(found) == len(tokens) and found == Counter([*prompt, *outputs, *drafted])


class Unread(tuple[int, ...]):
    """A prompt that must not be read again."""

    def __iter__(self) -> Any:
        raise AssertionError("the whole prompt is read again")


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_step_reads_what_is_new(penalty: str) -> None:
    torch.manual_seed(0)
    request = Request("r", tuple(range(20)), SamplingParams(temperature=0.0, **{penalty: 1.5}))
    for step in range(8):
        row = torch.randn(64)
        drafts = [() if step % 2 else (3, 40, 3)]
        before = [*range(20)] if penalty == "repetition_penalty" else []
        chosen = sample(row[None], row[None].argmax(-1).int(), [request], [0], drafts=drafts)[0].token_id
        assert chosen == int(penalized(row, [*before, *request.output_token_ids, *drafts[0]], penalty).argmax())
        request.prompt_token_ids = Unread(request.prompt_token_ids[:])
        request.output_token_ids += [chosen, 40] if step < 4 else [chosen]


def penalized(row: Tensor, seen: list[int], penalty: str) -> Tensor:
    """A token at a time."""
    row = row.clone()
    for token, count in Counter(seen).items():
        if penalty == "repetition_penalty":
            row[token] *= 1.5 if row[token] < 0 else 1 / 1.5
        else:
            row[token] -= 1.5 * (count if penalty == "frequency_penalty" else 1)
    return row
