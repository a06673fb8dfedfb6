"""``Outline``: a model of transformers before its weights are read: what it keeps of a token, and what it needs."""

from __future__ import annotations

from math import prod

from torch import nn
from transformers import PretrainedConfig

from qserve.kernels.executor import Executor
from qserve.runtime.cache import CacheLayout
from qserve.runtime.fallback import skeleton
from qserve.runtime.fallback.attention import cache_layout
from qserve.runtime.fallback.parameters import Parameters
from qserve.runtime.fallback.recording import Recording, expert_parameters, record
from qserve.runtime.fallback.unsupported import Unsupported

_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


class Outline:
    """A model without weights, and what a step of it does. Raises ``Unsupported`` where it cannot be served."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.model = skeleton.build(config)
        self.positions = skeleton.Positions(self.model)
        self.found: Recording = record(self.model, self.positions)

    @property
    def dense(self) -> list[nn.Parameter]:
        """The parameters that are needed as plain tensors."""
        needed = dict(self.found.dense)
        for module in self.found.experts:
            own = {id(parameter): parameter for parameter in module.parameters()}
            for product in expert_parameters(module):
                own.pop(id(product))
            needed |= own
        return list(needed.values())

    @property
    def layout(self) -> CacheLayout:
        return cache_layout(self.found.calls)

    def context(self) -> int:
        """Positions of a sequence. Beyond them transformers would compute all positions in another way, look at fewer
        keys than its attention function is told of, or have no embedding. Raises ``Unsupported`` where no limit is
        stated."""
        text = self.model.config.get_text_config(decoder=True)
        stated = [getattr(text, name, None) for name in _LIMITS]
        limits = [int(each) for each in stated if each][:1]
        if not limits:
            raise Unsupported("no limit of positions in its configuration")
        rope = getattr(text, "rope_parameters", None) or {}
        for each in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
            if each.get("rope_type") == "longrope":
                first = each.get("original_max_position_embeddings")
                limits.append(int(first or getattr(text, "original_max_position_embeddings", None) or limits[0]))
        kinds = getattr(text, "layer_types", None) or ()
        if "chunked_attention" in kinds:
            limits.append(int(text.attention_chunk_size))
        if "sliding_attention" in kinds and not any(call.window for call in self.found.calls):
            limits.append(int(text.sliding_window))
        return min(limits)

    def weight_bytes(self, parameters: Parameters, executor: Executor) -> int:
        """Bytes of the weights as ``executor`` and torch hold them; an upper bound."""
        found, dense = self.found, sum(4 * prod(parameter.shape) for parameter in self.dense)
        experts = [parameter for module in found.experts for parameter in expert_parameters(module)]
        products = [*found.linears.values(), *found.tables.values(), *experts]
        return dense + sum(parameters.nbytes(parameter, executor) for parameter in products)

    def workspace_bytes(self, tokens: int, rows: int) -> int:
        """Bytes of buffers, and of what torch computes of one layer, for steps of ``tokens`` and ``rows`` of logits."""
        found = self.found
        widths = {width for parameter in found.linears.values() for width in parameter.shape}
        widths |= {width for module in found.experts for each in expert_parameters(module) for width in each.shape[1:]}
        attention = max((call.heads + 2 * call.kv_heads) * call.key_dim for call in found.calls)
        per_token = sum(widths - {found.vocab_size}) + 8 * max(*(widths - {found.vocab_size}), attention)
        return 4 * (tokens * per_token + rows * 3 * found.vocab_size)
