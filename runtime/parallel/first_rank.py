"""``FirstRank``: the decoder of the first of the ranks that compute each layer together."""

from __future__ import annotations

from torch import Tensor

from qserve.kernels.executor import Step
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.parallel.step_channel import StepChannel


class FirstRank:
    """A decoder that lets the others run what it runs."""

    def __init__(self, decoder: Decoder, channel: StepChannel) -> None:
        self._decoder, self._channel = decoder, channel
        self.limits, self.executor, self.lora = decoder.limits, decoder.executor, decoder.lora
        self.x, self.logits, self.greedy, self.states = decoder.x, decoder.logits, decoder.greedy, decoder.states
        self.hidden = decoder.hidden
        self.sequence_states, self.slots = decoder.sequence_states, decoder.slots
        self.final_norm, self.log_softmax = decoder.final_norm, decoder.log_softmax  # of what this rank has as a whole

    @property
    def kv(self) -> Tensor:
        return self._decoder.kv

    def run(self, *steps: Step) -> None:
        self._channel.run(steps, self.greedy)
        self._decoder.run(*steps)

    def head(self, step: Step, rows: Tensor) -> None:
        self._channel.head(None if rows is step.logit_rows else rows)
        self._decoder.head(step, rows)
