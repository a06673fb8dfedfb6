"""``TransformersModel``: a model of transformers as the runner sees a decoder, with its paged KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.source import ModelSource
from qserve.kernels import registry
from qserve.kernels.executor import Executor, Step
from qserve.kernels.ops import Argmax, LogSoftmax
from qserve.runtime.fallback.attention import PagedAttention
from qserve.runtime.fallback.experts import mixing
from qserve.runtime.fallback.outline import Outline
from qserve.runtime.fallback.parameters import Parameters
from qserve.runtime.fallback.plain import plainly
from qserve.runtime.fallback.products import Products
from qserve.runtime.models.decoder import DecoderLimits, Progress


class TransformersModel:
    """Runs steps as ``Decoder`` does: ``logits`` float32 [max_logits, vocab], ``greedy`` int32 [max_logits] and
    ``states`` float32 [max_logits, hidden_size] hold the last head run.

    Everything that is not attention, a product or a looked-up row is computed by torch, in float32.
    """

    def __init__(
        self, source: ModelSource, outline: Outline, executor: Executor, limits: DecoderLimits, *,
        kv_dtype: torch.dtype = torch.float16, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.executor = limits, executor
        self._outline, found = outline, outline.found
        self._model, self._positions = outline.model, outline.positions
        self.parameters = Parameters(self._model, source)
        self.attention = PagedAttention(
            found.calls, executor, max_tokens=limits.max_tokens, positions=limits.max_positions,
            num_blocks=limits.num_blocks, dtype=kv_dtype,
        )  # fmt: skip
        self.layout, self.sequence_states = self.attention.layout, ()
        self.hidden: tuple[Tensor, ...] = ()
        self.slots = torch.empty(0)
        self._products = Products(executor, self.parameters, limits.max_tokens)
        self._load(progress)
        self.logits = torch.zeros(limits.max_logits, found.vocab_size)
        self.greedy = torch.empty(limits.max_logits, dtype=torch.int32)
        self.states = torch.empty(limits.max_logits, found.hidden_size)
        self._argmax, self._log_softmax = executor.program(limits.max_logits), executor.program(limits.max_logits)
        self._argmax.add([Argmax(self.logits, self.greedy)])
        self._log_softmax.add([LogSoftmax(self.logits)])
        self.fallbacks = registry.fallbacks(executor, [*self._products.ops, *self.attention.ops])
        assert found.base is not None
        self._base_forward = found.base.forward
        self._output: Any = None  # of the last step
        self._rows: Tensor | None = None
        self._recalls = False
        found.base.forward = self._base  # type: ignore[method-assign]

    def _load(self, progress: Progress | None) -> None:
        found, dense = self._outline.found, self._outline.dense
        total, done = len(found.linears) + len(found.tables) + len(found.experts) + len(dense), 0

        def loaded() -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, total)

        self._products.load(found, loaded)
        for parameter in dense:
            value = self.parameters.tensor(self.parameters.name(parameter), parameter.shape)
            parameter.data = value.float().contiguous()
            loaded()
        for name, buffer in self._model.named_buffers():
            if self.parameters.has(name):
                buffer.data = self.parameters.tensor(name, buffer.shape).to(buffer.dtype)

    def _base(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the submodel's ``forward``: its head gets the rows whose logits are wanted."""
        if self._rows is None:
            return self._base_forward(*args, **kwargs)
        if not self._recalls:
            self._output = self._base_forward(*args, **kwargs)
        output = self._output
        if isinstance(output, tuple):
            return (output[0][:, self._rows], *output[1:])
        return type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, self._rows]})

    @property
    def kv(self) -> Tensor:
        return self.attention.kv

    def plain(self, ids: Tensor) -> Tensor:
        """Logits float32 [tokens, vocab] of one sequence ``ids`` [tokens], int64, computed by transformers and torch
        alone. Weights are read again, and one at a time is in memory."""
        with plainly(self._model, self._outline.found, self.parameters), torch.inference_mode():
            logits: Tensor = self._positions.call(self._model, ids, None).logits[0]
            return logits

    def run(self, *steps: Step) -> None:
        """Compute a step, and the logits and greedy tokens of its ``logit_rows``."""
        step = steps[0]
        self._rows, self._recalls = step.logit_rows.long(), False
        with torch.inference_mode(), self.attention.step(steps), mixing(self._products.mix), self._products:
            self._take(self._positions.call(self._model, step.token_ids.long(), step.positions.long()), step)

    def head(self, step: Step, rows: Tensor) -> None:
        """Logits and greedy tokens of up to ``max_logits`` tokens ``rows`` (int32) of the step just run."""
        if rows is step.logit_rows:
            return
        self._rows, self._recalls = rows.long(), True
        with torch.inference_mode(), self._products:
            ids = step.token_ids[rows].long()
            self._take(self._positions.call(self._model, ids, ids), replace(step, logit_rows=rows))

    def _take(self, output: Any, step: Step) -> None:
        self._rows = None
        if step.logits:
            self.logits[: step.logits] = output.logits[0, -step.logits :]
            self._argmax.run(step)

    def final_norm(self, step: Step, rows: Tensor) -> None:
        """Fill ``states`` for up to ``max_logits`` tokens ``rows`` (int32) of the step just run."""
        output = self._output
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        self.states[: len(rows)] = hidden[0, rows.long()]

    def log_softmax(self, step: Step, rows: Tensor) -> None:
        """Turn the logits just computed into log-probabilities, in place."""
        self._log_softmax.run(replace(step, logit_rows=rows))
