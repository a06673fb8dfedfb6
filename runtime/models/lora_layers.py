"""``LoraLayers``: where adapters act in a decoder, and their matrices as its products read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qserve.checkpoint.lora import LoraAdapter
from qserve.kernels.lora_slots import LoraSlots, LoraTiles, Matrices, side_by_side
from qserve.kernels.ops import Lora
from qserve.runtime.models.row_order import Orders


@dataclass(frozen=True)
class _Product:
    """Linears that share an input: their names, the orders of their outputs, and the inputs that are here."""

    modules: tuple[str, ...]
    orders: tuple[Tensor | None, ...]
    inputs: slice
    slots: LoraSlots


@dataclass(frozen=True)
class LaidOut:
    """An adapter, with its matrices for each product of a decoder."""

    sha256: str
    matrices: tuple[Matrices, ...]

    @property
    def nbytes(self) -> int:
        return sum(tiles.nbytes for product in self.matrices for tiles in product if tiles is not None)


class LoraLayers:
    """Has ``count`` slots for adapters of ranks up to ``max_rank``. A builder asks for ``after`` each product; then
    ``shapes`` has [out, in] of every linear that can have an adapter.

    ``waiting``: by number, adapters that get their slots from ``change``.
    """

    def __init__(self, count: int, max_rank: int) -> None:
        self.count, self.max_rank = count, max_rank
        self.shapes: dict[str, tuple[int, int]] = {}
        self.waiting: dict[int, LaidOut] = {}
        self._products: list[_Product] = []

    def after(
        self,
        modules: Sequence[str],
        sizes: Sequence[int],
        x: Tensor,
        out: Tensor,
        orders: Orders = (None, None, None),
        inputs: range | None = None,
        width: int | None = None,
    ) -> Lora:
        """The operation behind the product of ``modules``, whose outputs (of ``sizes``, or those of them that
        ``orders`` name) lie side by side in ``out``. ``inputs``: those that ``x`` has, of ``width``."""
        held = [size if order is None else len(order) for size, order in zip(sizes, orders)]
        starts = [sum(held[:part]) for part in range(len(held))]
        slots = LoraSlots(list(zip(starts, held)), self.count, self.max_rank)
        own = slice(None) if inputs is None else slice(inputs.start, inputs.stop)
        self._products.append(_Product(tuple(modules), tuple(orders[: len(modules)]), own, slots))
        self.shapes |= {module: (size, width or x.shape[1]) for module, size in zip(modules, sizes)}
        return Lora(x, out, slots)

    def lay_out(self, adapter: LoraAdapter) -> LaidOut:
        """``adapter``, which was read with ``shapes``. Any thread may call it while steps run."""
        return LaidOut(adapter.sha256, side_by_side([
            tuple(
                LoraTiles.of(adapter.modules[module], order, product.inputs) if module in adapter.modules else None
                for module, order in zip(product.modules, product.orders)
            )
            for product in self._products
        ]))  # fmt: skip

    def put(self, slot: int, adapter: LaidOut) -> None:
        """Fill a slot, between two steps."""
        for product, matrices in zip(self._products, adapter.matrices, strict=True):
            product.slots.put(slot, matrices)

    def clear(self, slot: int) -> None:
        """Empty a slot that no token of a later step has."""
        for product in self._products:
            product.slots.clear(slot)

    def change(self, slot: int, number: int) -> None:
        """Fill a slot with the adapter that is ``waiting`` by this number, or empty it (-1)."""
        if number < 0:
            self.clear(slot)
        else:
            self.put(slot, self.waiting.pop(number))
