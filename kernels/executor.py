"""``Executor``: a way to compute operations. It makes a ``Program`` of them, which runs a ``Step``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qserve.checkpoint.grid import Grid
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.kernels.ops import Op


@dataclass(frozen=True)
class Placement:
    """Where an executor takes a model's buffers, and in which form.

    Attributes:
        device: of every buffer and of the cache; the tensors of a ``Step`` are in the machine's own memory.
        activations: dtype of the inputs of products. The residual stream and the logits are float32 everywhere.
        keys_by_token: a page's keys lie token by token in memory, like its values. The shape that an operation sees
            is still that of ``RopeKV``.
        dense: dtype in which products hold dense weights; None keeps each as it is stored.
        unpacked: grids that no kernel multiplies as they are stored: their weights are held as dense ones.
    """

    device: torch.device
    activations: torch.dtype
    keys_by_token: bool = False
    dense: torch.dtype | None = None
    unpacked: tuple[Grid, ...] = ()


CPU = torch.device("cpu")
HOST = Placement(CPU, torch.float32)


@dataclass(frozen=True)
class Step:
    """What one step runs; all int32 and contiguous.

    token_ids, positions, slots  [tokens]; a slot is block * 16 + offset
    seq_start                    [sequences + 1]: sequence s owns tokens seq_start[s] .. seq_start[s + 1] - 1
    block_tables                 [sequences, widest table], padded with anything
    logit_rows                   [logits]: the tokens whose logits are wanted
    adapters                     [tokens]: the slot of each token's adapter, -1 for none; None where no token has one
    state_slots                  [sequences]: where the states of each sequence are; None where no layer keeps any
    state_saves                  [tokens]: the slot that gets a copy of the states behind each token, -1 for none; None
                                 where no token has one. No two are the same, and none is among ``state_slots``
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_start: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    adapters: Tensor | None = None
    state_slots: Tensor | None = None
    state_saves: Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logits(self) -> int:
        return len(self.logit_rows)

    @property
    def sequences(self) -> int:
        return len(self.seq_start) - 1

    @property
    def table_stride(self) -> int:
        return self.block_tables.shape[1]

    def count(self, op: object) -> int:
        """Rows of an operation."""
        return self.logits if getattr(op, "rows", "tokens") == "logits" else self.tokens


class Program(Protocol):
    """Operations made ready by an executor, in order."""

    def add(self, ops: Sequence[Op]) -> None:
        """Make ``ops`` ready now. Packed weights are laid out for the kernels; the originals need not be kept. A value
        that one of ``ops`` writes and only others of them read may stay unwritten."""
        ...

    def run(self, step: Step) -> None: ...


class Executor(Protocol):
    """A way to compute operations.

    ``supports`` returns None, or why an operation has no kernel; programs then compute it by its reference.
    ``asynchronous``: a program's run returns before it is computed. ``warm_sizes``: numbers of rows whose first step
    takes long to prepare.
    """

    name: str
    batch_invariant: bool
    asynchronous: bool
    warm_sizes: Sequence[int]
    placement: Placement

    def supports(self, op: Op) -> str | None: ...

    def packed_bytes(self, scheme: WeightScheme, activations: ActivationScheme | None, out: int, inp: int) -> int:
        """Bytes of a packed weight [out, in] as its product holds it, without an order of inputs. An upper bound: the
        type of its scales is not known before they are read."""
        ...

    def program(self, max_rows: int) -> Program:
        """An empty program for steps of at most ``max_rows`` rows. Programs of one executor do not overlap."""
        ...
