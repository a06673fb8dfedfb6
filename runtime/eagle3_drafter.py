"""``Eagle3Drafter``: drafts of an ``Eagle3Head``: for whom, how many, and what was right.

It decides as ``ModelDrafter`` does. But the head reads the target's hidden states, and they are there only for
positions that the target computed. The newest ones of a request wait to be read. Where the head comes too late, or the
prompt came from the prefix cache, its own cache begins anew at the first state that waits. Rotations are relative, so
its positions count from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from qserve.runtime.acceptance import AcceptanceRates
from qserve.runtime.draft_model import DraftModel, Span
from qserve.runtime.draft_reader import DraftReader
from qserve.runtime.drafter import HALVED
from qserve.runtime.eagle3_head import Eagle3Head
from qserve.runtime.hidden_states import HiddenStates
from qserve.runtime.model_drafter import ModelDrafter
from qserve.runtime.request import Request
from qserve.runtime.speculative_config import SpeculativeConfig
from qserve.runtime.step_plan import StepPlan

_KINDS = 4  # a guess behind others is less likely right, as it is made of them


class Eagle3Drafter(ModelDrafter):
    """Drafts for a target whose steps have up to ``max_rows`` rows of logits over ``vocab_size`` tokens."""

    def __init__(
        self, head: Eagle3Head, config: SpeculativeConfig, max_rows: int, vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        super().__init__(head, config, max_rows, vocab_size, clock)
        self._everyone = AcceptanceRates(_KINDS, HALVED[1])
        self._waiting = head.waiting

    def saw(self, plan: StepPlan, requests: Mapping[str, Request], hidden: Sequence[Tensor]) -> None:
        """``plan`` was computed, with these ``hidden`` states; ``requests``, by id, are those that did not end."""
        self._waiting.add(
            [(requests.get(each.request_id), each.start, len(each.token_ids)) for each in plan.sequences], hidden
        )

    def _reader(self, request: Request) -> DraftReader:
        return _Reader(request, self.model, self._everyone, self._waiting, self._most)


class _Reader(DraftReader):
    """The row at a position holds the token there and the state of the position before it. Guesses are read again when
    they came: then their states are known."""

    def __init__(
        self, request: Request, model: DraftModel, everyone: AcceptanceRates, waiting: HiddenStates, most: int
    ) -> None:  # fmt: skip
        super().__init__(request, model, everyone)
        self._waiting, self._most = waiting, most

    @property
    def can_read(self) -> bool:
        known = self._waiting.known(self.request)
        return super().can_read and known.start < self.start and self.num_known - 1 <= known.stop

    def span(self, stop: int, num_guesses: int) -> Span:
        states = self._waiting.of(self.request, self.start - 1, stop - 1)
        return super().span(stop, num_guesses)._replace(states=states)

    def follow(self) -> None:
        self._note_what_came()
        first, limit = self._waiting.known(self.request).start + 1, self._model.max_model_len
        is_full = self.num_known + self._most - self.base > limit
        if not self.is_open or self.start < first or is_full:
            self.close()
            self.base = self.num_computed = min(max(first, self.num_known - limit // 2), self.num_known)
            self._model.blocks.open(self.name)
            self.is_open = True
        else:
            self._model.blocks.truncate(self.name, self.num_computed - self.base)
