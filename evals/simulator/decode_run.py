"""``LeapingScheduler``: the engine's scheduler, which can also take many decode steps at once.

While all running requests decode, none ends and none may join, each step is like the one before, a token further. The
result of many such steps can be written down without planning each. A property test checks that it is what ``schedule``
and ``commit`` would leave behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from qserve.runtime.request import Status
from qserve.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Consecutive decode steps of the same requests.

    Attributes:
        sequences: how many requests decode.
        positions: KV positions that the first step attends to; each further step attends to ``sequences`` more.
        steps: the number of steps until a request ends; one ends in the last of them.
        new_blocks: ``new_blocks[i % block_size]`` is the number of blocks that step i takes.
    """

    sequences: int
    positions: int
    steps: int
    new_blocks: tuple[int, ...]


class LeapingScheduler(Scheduler):
    """For requests with one choice each, whose output has a length and ends by nothing else."""

    def decode_run(self) -> DecodeRun | None:
        """The steps that can be taken now, or None where the next one must be planned. No plan may be in flight."""
        running, size = self._running, self.blocks.block_size
        full = len(running) == self.config.max_num_seqs and self._shares.num_tenants == 1
        if not running or (self._waiting and not full):
            return None
        growth = [0] * size
        positions, steps = 0, running[0].max_output_tokens
        for request in running:
            if not request.is_decoding:
                return None
            computed = request.num_computed
            offset = computed % size
            if not offset and self.blocks.is_writable(request.request_id, computed):
                return None  # it got this block on its return from a preemption, and takes none here
            positions += computed + 1
            growth[-offset] += 1
            left = request.max_output_tokens - len(request.output_token_ids)
            if left < steps:
                steps = left
        return DecodeRun(len(running), positions, steps, tuple(growth))

    def leap(self, steps: int, token: int) -> list[str]:
        """Do what ``steps`` steps of the run would do, each sampling ``token``; returns the requests that ended.

        The blocks they take must be free, and no more than ``DecodeRun.steps`` are allowed.
        """
        ended = []
        for request in self._running:
            stop = request.num_computed + steps
            if stop > len(self.blocks.table(request.request_id)) * self.blocks.block_size:
                self.blocks.allocate(request.request_id, stop, write_from=request.num_computed)
            request.output_token_ids += [token] * steps
            request.num_computed = stop
            self._shares.charge(request.tenant, 0, steps, request.weight)
            self._publish(request, stop)
            request.num_committed = stop
            if len(request.output_token_ids) >= request.max_output_tokens:
                ended.append(request)
        # They end after the loop, as in the last step: until then their blocks belong to nobody else.
        for request in ended:
            assert request.status is Status.RUNNING
            self._end(request, "length", None)
        self._step += steps
        return [request.request_id for request in ended]
