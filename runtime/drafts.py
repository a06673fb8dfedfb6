"""``Drafts``: decodes of a step that are lengthened by guesses of what comes next, and what is taken back of them.

A draft takes what others leave of a step's tokens, rows and blocks: no request is preempted or delayed for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qserve.runtime.blocks import BlockManager
from qserve.runtime.limits import SchedulerConfig
from qserve.runtime.request import Request, Status
from qserve.runtime.step_plan import ScheduledSequence

Planned = list[tuple[Request, ScheduledSequence]]


class Drafts:
    """``num_drafts`` counts drafts, ``num_draft_tokens`` their tokens and ``num_accepted_tokens`` those that were
    right."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    def add(
        self, decoded: Planned, others: Planned, drafts: Mapping[str, Sequence[int]], *, spare: int
    ) -> list[tuple[int, int]]:
        """Lengthen planned decodes by their drafts, as far as ``others`` leave tokens and rows of the step, and
        ``spare`` blocks stay free. Returns the copies of blocks to be made first."""
        config, copies = self._config, list[tuple[int, int]]()
        tokens = config.max_num_batched_tokens - len(decoded) - sum(len(each.token_ids) for _, each in others)
        rows = config.logits_limit - len(decoded) - sum(each.num_sampled for _, each in others)
        for index, (request, sequence) in enumerate(decoded):
            draft, name, start = drafts.get(request.request_id), request.request_id, request.num_computed
            if not draft or request.beams or request.num_plans > 1:
                continue
            left = request.max_output_tokens - len(request.output_token_ids) - 1
            count = min(len(draft), tokens, rows, left)
            while count > 0 and not self._blocks.can_allocate(name, start + count, write_from=start, spare=spare):
                count -= 1
            if count > 0:
                copies += self._blocks.allocate(name, start + count, write_from=start)
                request.num_drafted = count
                request.num_in_flight += count
                request.num_computed += count
                tokens, rows = tokens - count, rows - count
                self.num_drafts += 1
                self.num_draft_tokens += count
                decoded[index] = request, sequence._replace(
                    token_ids=(*sequence.token_ids, *draft[:count]),
                    block_tables=self._blocks.block_tables(name),
                    num_sampled=1 + count,
                )
        return copies

    def take_back(self, request: Request, end: int, *, accepted: int) -> None:
        """Forget what a draft computed past the ``end`` of the run that was taken."""
        request.num_drafted = 0
        self.num_accepted_tokens += accepted
        if request.status is Status.RUNNING:
            request.num_computed = end
            self._blocks.truncate(request.request_id, end + 1)
