"""Times of prefill and decode by roofline: each matrix product takes as long as its bytes or its operations do.

The model is that of Williams et al. (doi 10.1145/1498765.1498785) per linear, scaled by the share of the peaks that
real kernels reach, which ``Efficiency`` names and nothing hides. An all-reduce takes the time of its bytes and a
latency, however few they are: decoding sends a few kilobytes, so that there it is nearly all latency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qserve.evals.planner.catalog import Gpu
from qserve.evals.planner.efficiency import Efficiency
from qserve.evals.planner.quantization import Quantization, kv_bytes
from qserve.evals.planner.shape import Linear, ModelShape
from qserve.runtime.state_slots import snapshots_for

NETWORK = 50e9
"""Bytes per second of one GPU to another machine: a port of 400 Gbit/s each."""
MACHINE = 8
"""GPUs of one machine."""
HOP, NETWORK_HOP = 0.6e-6, 2.7e-6
"""Seconds of one of the 2 (n - 1) hops among n GPUs: over NVLink, which is the least, and over a network.
NCCL's own, as ``ALL_REDUCE`` is."""


@dataclass(frozen=True)
class Layout:
    """One replica: matrices split over ``tp`` GPUs, layers over ``pp`` groups of those."""

    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp}" + (f" x PP {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True)
class ReplicaRoofline:
    """What one replica of one model holds, and how long its prefills and decodes take."""

    shape: ModelShape
    quantization: Quantization
    kv_dtype: str
    gpu: Gpu
    layout: Layout
    efficiency: Efficiency

    @property
    def bandwidth(self) -> float:
        """Bytes per second, as reached."""
        return self.gpu.bandwidth * self.efficiency.mbu

    def flops(self, dtype: str = "bf16") -> float:
        """Operations per second, as reached."""
        return self.gpu.flops[dtype] * self.efficiency.mfu

    @property
    def kv_number(self) -> float:
        """Bytes of a number in the KV cache."""
        return kv_bytes(self.kv_dtype, self.shape.score_width)

    @property
    def kv_share(self) -> float:
        """The share of a layer's cache on each of the ``tp`` GPUs: a head is not split, and all heads use MLA's latent.
        """
        heads = self.shape.kv_heads
        return -(-heads // self.layout.tp) / heads

    @property
    def weights_per_gpu(self) -> float:
        """Bytes on the fullest GPU: the longest stage of layers, with the embedding, the output layer, or both."""
        shape, layout = self.shape, self.layout
        stage = -(-shape.num_layers // layout.pp) / shape.num_layers
        head, embedding = shape.head_bytes, 2.0 * shape.embedding
        ends = max(head, embedding) if layout.pp > 1 else embedding + (0 if shape.tied else head)
        return (shape.layer_bytes(self.quantization.scheme) * stage + ends) / layout.tp

    @property
    def kv_room(self) -> float:
        """Bytes left on one GPU for keys and values; negative where the weights do not fit."""
        return self.gpu.memory * self.efficiency.memory - self.weights_per_gpu

    def kv_per_request(self, tokens: float) -> float:
        """Bytes of a request on one GPU."""
        stage = -(-self.shape.num_layers // self.layout.pp) / self.shape.num_layers
        kept = self.shape.kv_bytes(tokens, self.kv_number) - self.shape.state_bytes
        return kept * stage * self.kv_share + self.states_per_request

    @property
    def states_per_request(self) -> float:
        """Bytes on one GPU of what layers keep of a request of any length, and of each snapshot of that. They are
        divided by heads, of which there are more than GPUs."""
        stage = -(-self.shape.num_layers // self.layout.pp) / self.shape.num_layers
        return self.shape.state_bytes * stage / self.layout.tp

    def largest_batch(self, tokens: float) -> int:
        """Requests of ``tokens`` that are held at once, beside the snapshots of states for so many."""
        each, states = self.kv_per_request(tokens), self.states_per_request
        return last(
            max(0, int(self.kv_room // each)),
            lambda batch: batch * each + snapshots_for(batch) * states <= self.kv_room,
        )

    def linear(self, linear: Linear, rows: float) -> float:
        """Seconds of one such product for ``rows`` tokens: the larger of moving weights and activations, or computing.
        """
        packed = linear.packed
        weights = linear.experts_read(rows) * linear.weight_bytes(self.quantization.scheme)
        used = rows * linear.active
        moved = weights + 2.0 * used * (linear.in_features + linear.out_features)
        done = 2.0 * used * linear.size
        flops = self.flops(self.quantization.compute if packed else "bf16")
        return max(moved / self.bandwidth, done / flops) / self.layout.tp

    def linears(self, rows: float, head_rows: float) -> float:
        """Seconds of all products of a step."""
        return sum(
            linear.count * self.linear(linear, head_rows if linear.kind == "head" else rows)
            for linear in self.shape.linears
        )

    @property
    def all_reduce_latency(self) -> float:
        """Seconds of one all-reduce of no bytes."""
        hop = HOP if self.layout.tp <= MACHINE else NETWORK_HOP
        return self.efficiency.all_reduce + 2 * (self.layout.tp - 1) * hop if self.layout.tp > 1 else 0.0

    def exchange(self, rows: float) -> float:
        """Seconds to send ``rows`` hidden states between GPUs: two ring all-reduces a layer, a hop a stage."""
        layout, size = self.layout, 2.0 * rows * self.shape.hidden_size
        link = self.gpu.link if layout.tp <= MACHINE else NETWORK
        ring = 2 * (layout.tp - 1) / layout.tp * size / (link * self.efficiency.link) + self.all_reduce_latency
        stage, latency = (self.gpu.link, HOP) if layout.gpus <= MACHINE else (NETWORK, NETWORK_HOP)
        between = size / (stage * self.efficiency.link) + self.efficiency.all_reduce + latency
        return 2 * self.shape.num_layers * ring + (layout.pp - 1) * between

    def decode_attention(self, cached: float) -> float:
        """Seconds in which decodes look back at ``cached`` positions, over all layers: read, or scores computed."""
        shape = self.shape
        read = cached * shape.kv_width * self.kv_number * self.kv_share
        width = shape.latent_score_width + shape.latent_value_width
        done = 2.0 * cached * shape.num_heads * width / self.layout.tp
        return max(read / self.bandwidth, done / self.flops())

    def states(self, rows: float) -> float:
        """Seconds in which the states of ``rows`` requests are read and written, in layers that keep them."""
        return 2.0 * rows * self.shape.state_bytes / self.layout.tp / self.bandwidth

    def prefill_attention(self, pairs: float) -> float:
        """Seconds of ``pairs`` of a prompt's token and one that it looks at, over all layers: they are computed."""
        shape = self.shape
        return 2.0 * pairs * shape.num_heads * (shape.score_width + shape.value_width) / self.layout.tp / self.flops()

    def decode_parts(self, batch: int, tokens: float) -> dict[str, float]:
        """Seconds until each of ``batch`` running requests has its next token; a stage works on ``batch / pp``."""
        rows = max(1.0, batch / self.layout.pp)
        return {
            "weights": self.linears(rows, rows),
            "attention": self.decode_attention(rows * self.shape.cached(tokens)) + self.states(rows),
            "exchange": self.exchange(rows),
            "overhead": self.efficiency.overhead,
        }

    def decode(self, batch: int, tokens: float) -> float:
        return sum(self.decode_parts(batch, tokens).values())

    def prefill_parts(self, prompt: int, chunk: int, computed: int | None = None) -> dict[str, float]:
        """Seconds of work for a prompt that is computed alone, in chunks, through all stages one after another.

        ``computed``: its last tokens, the others being in the cache; None for all of them.
        """
        shape, computed = self.shape, prompt if computed is None else computed
        sizes = [(size, n) for size, n in ((chunk, computed // chunk), (computed % chunk, 1)) if size and n]
        last = sum(linear.count * self.linear(linear, 1) for linear in shape.linears if linear.kind == "head")
        return {
            "weights": last + sum(n * self.linears(size, 0) for size, n in sizes),
            "attention": self.prefill_attention(shape.looked_at(prompt) - shape.looked_at(prompt - computed)),
            "exchange": sum(n * self.exchange(size) for size, n in sizes),
        }

    def prefill(self, prompt: int, chunk: int, computed: int | None = None) -> float:
        return sum(self.prefill_parts(prompt, chunk, computed).values())


def last(most: int, holds: Callable[[int], bool]) -> int:
    """The last number of 1 to ``most`` up to which ``holds`` is true; 0 where there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
