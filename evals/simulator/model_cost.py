"""``ModelCost``: steps of the simulator by the planner's roofline, so that both say the same of a model on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.evals.planner.replica_roofline import ReplicaRoofline
from qserve.evals.planner.shape import BLOCK
from qserve.runtime.state_slots import snapshots_for


@dataclass(frozen=True)
class ModelCost:
    """Prompts and decodes of a step share its products. Layers with a window count as if nobody looked back farther
    on average than all do: where some requests are short and others long, that is a little too much.

    Raises ``UsageError`` for stages of layers: the simulator runs one step at a time.
    """

    roofline: ReplicaRoofline

    def __post_init__(self) -> None:
        if self.roofline.layout.pp > 1:
            raise UsageError("a simulated replica has one stage of layers")

    def num_blocks(self, max_num_seqs: int) -> int:
        """KV blocks that fit beside the weights, as if all layers kept all tokens, and beside the states of so many
        requests and their snapshots. Raises ``CapacityError``."""
        roofline = self.roofline
        each = roofline.states_per_request
        states = (max_num_seqs + snapshots_for(max_num_seqs)) * each
        found = int((roofline.kv_room - states) // (roofline.kv_per_request(BLOCK) - each))
        if found < 1:
            beside = f" and {states / 1e9:.1f} GB of states of --max-num-seqs {max_num_seqs}" if states else ""
            raise CapacityError(
                f"{roofline.weights_per_gpu / 1e9:.1f} GB of weights{beside} leave no room for the KV cache on "
                f"{roofline.layout} of {roofline.gpu.name}: raise --tp, or take fewer bits with --quantization"
            )
        return found

    def seconds(self, tokens: int, rows: int, prefill_kv: int, decode_kv: int) -> float:
        roofline, shape = self.roofline, self.roofline.shape
        return (
            roofline.linears(tokens, rows)
            + roofline.decode_attention(shape.capped(decode_kv, rows))
            + roofline.states(rows)
            + roofline.prefill_attention(shape.capped(prefill_kv, tokens))
            + roofline.exchange(tokens)
            + roofline.efficiency.overhead
        )
