"""``ModelShape``: the arithmetic of a decoder: parameters, weight bytes, KV bytes and operations per token.

GB is 10^9 bytes and GiB 2^30 bytes, in printed text too.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from qserve.checkpoint.spec import WeightScheme

Kind = Literal["attention", "mlp", "experts", "shared expert", "router", "head"]
BLOCK = 16
"""Tokens of a KV block: a request holds whole ones."""


@dataclass(frozen=True)
class Linear:
    """Matrices of one form: ``count`` layers have one, or ``experts`` matrices of which a token uses ``active``."""

    kind: Kind
    out_features: int
    in_features: int
    count: int
    experts: int = 1
    active: int = 1

    @property
    def size(self) -> int:
        return self.out_features * self.in_features

    @property
    def packed(self) -> bool:
        """Whether a quantized checkpoint packs it: routers and the output layer stay in 16 bits."""
        return self.kind not in ("router", "head")

    def weight_bytes(self, scheme: WeightScheme | None) -> float:
        """Bytes of one matrix: codes, scales and packed zero points, or 16-bit floats for None."""
        if scheme is None or not self.packed:
            return 2.0 * self.size
        return scheme.storage_bits(self.out_features, self.in_features) / 8

    def experts_read(self, rows: float) -> float:
        """The number of experts that ``rows`` tokens need together, if they choose evenly and independently."""
        missed: float = (1 - self.active / self.experts) ** rows
        return self.experts * (1 - missed)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        attention: MHA, GQA, MQA or MLA (DeepSeek-V2, arXiv 2405.04434).
        kv_heads: heads that are cached; 1 for MLA, whose latent all heads share.
        kv_width: numbers that one token leaves in one layer.
        windows: tokens that each layer that keeps keys looks back, 0 for all of them.
        score_width: numbers per head that a query is multiplied with for one cached token; ``value_width``: those that
            are summed for it; ``latent_*``: the same where an MLA cache is read as it is stored.
        embedding: parameters of token and position embeddings; ``other``: those of norms and biases.
        tied: the output layer is the embedding.
        state_bytes: of a request, in layers that keep a state of it and no keys.
        part_of: the type of a model that also sees or hears, of which this is the text part.
    """

    name: str
    family: str
    attention: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    kv_width: int
    windows: tuple[int, ...]
    score_width: int
    value_width: int
    latent_score_width: int
    latent_value_width: int
    linears: tuple[Linear, ...]
    embedding: int
    other: int
    tied: bool
    context: int
    stored_as: str | None = None
    state_bytes: int = 0
    part_of: str | None = None

    def parameters_by_kind(self) -> dict[str, int]:
        """A tied output layer counts once, as the embedding."""
        found = Counter({"embedding": self.embedding})
        for linear in self.linears:
            if not (linear.kind == "head" and self.tied):
                found[linear.kind] += linear.count * linear.experts * linear.size
        found["norms and biases"] += self.other
        return dict(found)

    @property
    def parameters(self) -> int:
        return sum(self.parameters_by_kind().values())

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: all but the experts that were not chosen."""
        idle = sum(linear.count * (linear.experts - linear.active) * linear.size for linear in self.linears)
        return self.parameters - idle

    def layer_bytes(self, scheme: WeightScheme | None) -> float:
        """Bytes of all layers: linears in ``scheme``, routers, norms and biases in 16 bits."""
        return 2.0 * self.other + sum(
            linear.count * linear.experts * linear.weight_bytes(scheme)
            for linear in self.linears
            if linear.kind != "head"
        )

    @property
    def head_bytes(self) -> float:
        return 2.0 * self.vocab_size * self.hidden_size

    def weight_bytes(self, scheme: WeightScheme | None) -> float:
        """Bytes of the whole model; embeddings and the output layer in 16 bits, a tied one held once."""
        return self.layer_bytes(scheme) + 2.0 * self.embedding + (0 if self.tied else self.head_bytes)

    def kv_bytes_per_token(self, element_bytes: float) -> int:
        """Bytes of one token in every layer that still looks at it."""
        return round(len(self.windows) * self.kv_width * element_bytes)

    def kv_bytes(self, tokens: float, element_bytes: float) -> int:
        """Bytes of a request of ``tokens``, in whole blocks; a window keeps no more than itself. With its states."""
        blocks = math.ceil(tokens / BLOCK) * BLOCK
        return round(self.kv_width * element_bytes * round(self.cached(blocks))) + self.state_bytes

    def cached(self, tokens: float) -> float:
        """Tokens in the cache of a request of ``tokens``, summed over the layers."""
        return sum(count * (min(tokens, window) if window else tokens) for window, count in self._windows)

    def looked_at(self, tokens: int) -> float:
        """Pairs of a token and a token that it attends to, for a prompt of ``tokens``, summed over the layers."""
        total = 0.0
        for window, count in self._windows:
            full = min(tokens, window) if window else tokens
            total += count * (full * (full + 1) / 2 + (tokens - full) * full)
        return total

    def capped(self, positions: float, tokens: float) -> float:
        """Positions that ``tokens`` look back at, ``positions`` together where nothing is cut, summed over the layers;
        exact where all are beyond a window or all within."""
        return sum(
            count * (min(positions, window * tokens) if window else positions) for window, count in self._windows
        )

    @property
    def _windows(self) -> list[tuple[int, int]]:
        return sorted(Counter(self.windows).items())
