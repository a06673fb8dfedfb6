"""``SharedPool``: an amount that all tenants share, of which none can keep the others out."""

from __future__ import annotations

from collections import Counter


class SharedPool:
    """One tenant may hold as much as it leaves free: half of it alone, a third beside another that holds as much. So
    whoever comes next finds room (dynamic thresholds: Choudhury and Hahne, 1998).

    All callers share one event loop.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: Counter[str] = Counter()

    @property
    def free(self) -> int:
        return self.size - self._held.total()

    def take(self, tenant: str, amount: int = 1) -> bool:
        """Take ``amount``, or nothing and return False where that is more than the tenant may hold."""
        if self._held[tenant] + amount > self.free - amount:
            return False
        self._held[tenant] += amount
        return True

    def restore(self, tenant: str, amount: int) -> None:
        """What a tenant holds from before, however much that is."""
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int = 1) -> None:
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    def check(self) -> None:
        assert all(held >= 0 for held in self._held.values())
