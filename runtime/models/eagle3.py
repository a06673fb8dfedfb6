"""``Eagle3Decoder``: the layers of an EAGLE-3 head (arXiv 2503.01840) and their paged KV cache, as programs over fixed
buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.source import ModelSource
from qserve.kernels.executor import Executor, Step
from qserve.kernels.int8 import round_to_int8
from qserve.kernels.ops import BLOCK_SIZE, Cast, Embed, Linear, Op, RMSNorm
from qserve.runtime.models.buffers import Buffers
from qserve.runtime.models.decoder import DecoderLimits, pages_of
from qserve.runtime.models.eagle3_config import Eagle3Config
from qserve.runtime.models.layers import LayerBuilder
from qserve.runtime.models.weights import Weight, Weights


class _Rounded(Weights):
    """Dense linears rounded to int8: guesses need no more, and are read in half the time."""

    def linear(
        self, module: str, out: int, inp: int, *, rows: Tensor | None = None, inputs: range | None = None,
        transposed: bool = False,
    ) -> tuple[Weight, Tensor | None]:
        weight, bias = super().linear(module, out, inp, rows=rows, inputs=inputs, transposed=transposed)
        return round_to_int8(weight) if isinstance(weight, Tensor) else weight, bias


class Eagle3Decoder:
    """Row i of a step holds the token at a position, and what is known of the position before it: the target's hidden
    states, or where those are not known yet, the head's own output.

        features = fc [states_1 | states_2 | ...]            (or the own output x of the row before)
        x = features, or hidden_norm(features) with ``norm_before_residual``
        x = x + attention([input_layernorm(embedding) | hidden_norm(features)])
        x = x + mlp(post_attention_layernorm(x));  further layers are those of a plain decoder
        greedy = the largest of lm_head norm(x), an index of the drafts' vocabulary

    Attributes:
        states: float32 [max_tokens, layers * hidden_size], the input of ``combine``.
        features: float32 [max_tokens, width], which ``combine`` fills, or the caller.
        x: float32 [max_tokens, width], the output of ``run``.
        greedy: int32 [max_logits], that of ``head``.

    ``table``: the embeddings of the target's tokens, for a head that has none of its own. ``int8``: dense weights are
    rounded. Raises ``CheckpointError`` where a weight is missing or has the wrong shape.
    """

    def __init__(
        self,
        source: ModelSource,
        config: Eagle3Config,
        executor: Executor,
        limits: DecoderLimits,
        table: Weight | None = None,
        *,
        kv_dtype: torch.dtype = torch.float16,
        int8: bool = True,
    ) -> None:
        self.config, self.limits = config, limits
        shape, tokens, rows = config.layers, limits.max_tokens, limits.max_logits
        buffers = Buffers.allocate(
            shape, executor.placement, tokens=tokens, rows=rows, positions=limits.max_positions
        )
        weights = (_Rounded if int8 else Weights)(source)
        width = shape.hidden_size
        self.states = torch.zeros(tokens, len(config.hidden_layers) * config.hidden_size)
        self.features, embedded = torch.zeros(tokens, width), torch.empty(tokens, width)
        joined = torch.empty(tokens, 2 * width)
        self.x, self.greedy = buffers.x, buffers.greedy
        spec = shape.cache_layout.groups[0].spec
        cache = shape.num_hidden_layers, 2, limits.num_blocks, spec.kv_heads * spec.head_dim * BLOCK_SIZE
        kv = torch.empty(cache, dtype=kv_dtype).zero_()  # memory that was never written would still look free
        held = (self.states, self.features, embedded, joined, kv)
        self.nbytes = buffers.nbytes + sum(each.nbytes for each in held)

        def norm(module: str, x: Tensor, out: Tensor) -> RMSNorm:
            return RMSNorm(x, weights.tensor(f"{module}.weight", x.shape[1]), out, shape.rms_norm_eps)

        fc, bias = weights.linear("fc", width, self.states.shape[1])
        self._combine = executor.program(tokens)
        before = [norm("input_norm", self.states, self.states)] if config.norm_before_fc else []
        self._combine.add([*before, Linear(self.states, fc, self.features, bias)])

        if weights.has(shape.modules.embedding):
            table = weights.tensor(f"{shape.modules.embedding}.weight", config.target_vocab_size, width)
        if table is None:
            raise CheckpointError(f"{source.name} has no embed_tokens.weight, and the model's is not {width} wide")
        first = f"{shape.modules.layers}.0"
        stream: Op = Cast(self.features, self.x)
        if config.norm_before_residual:
            stream = norm(f"{first}.hidden_norm", self.features, self.x)
        builder = LayerBuilder(shape, weights, buffers, kv_dtype)
        self._body = executor.program(tokens)
        self._body.add([
            Embed(table, embedded),
            stream,
            norm(f"{first}.input_layernorm", embedded, joined[:, :width]),
            norm(f"{first}.hidden_norm", self.features, joined[:, width:]),
        ])  # fmt: skip
        for i, place in enumerate(kv):
            pages = pages_of(place, spec, executor.placement)
            self._body.add(builder.layer(i, pages, None if i else joined))
        self._head = executor.program(rows)
        self._head.add(builder.head(int8=int8))

    def combine(self, step: Step) -> None:
        """Fill ``features`` from ``states``, whose contents are undefined afterwards."""
        self._combine.run(step)

    def run(self, step: Step) -> None:
        """Write keys and values of the step's rows, and leave their outputs in ``x``."""
        self._body.run(step)

    def head(self, step: Step) -> None:
        """The likeliest tokens behind the ``logit_rows`` of the step just run."""
        self._head.run(step)
