"""Fixed pools of physical pages with reference counts, and what one step takes from them."""

from __future__ import annotations

import heapq
from collections import Counter

from kvkernels.errors import CapacityError


class PagePool:
    """Fixed set of physical pages with reference counts; the lowest free page is taken first."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self._refs = [0] * capacity
        self._free = list(range(capacity))

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, held once by the caller."""
        if not self._free:
            raise CapacityError(
                f"no free {self.name}: all {self.capacity} are held; "
                "remove a sequence or plan with larger n_ctx or n_seq"
            )
        page = heapq.heappop(self._free)
        self._refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a held page."""
        assert self._refs[page] > 0
        self._refs[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        assert self._refs[page] > 0
        self._refs[page] -= 1
        if not self._refs[page]:
            heapq.heappush(self._free, page)

    def shared(self, page: int) -> bool:
        """Whether somebody else holds this page too."""
        return self._refs[page] > 1

    def holders(self, page: int) -> int:
        """How many hold it."""
        return self._refs[page]


class Taking:
    """Pages that a step has taken so far: given back when it fails. ``left``: holders that a ring
    loses when the step is published.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[PagePool, int]] = []
        self._left: Counter[tuple[int, int]] = Counter()

    def take(self, pool: PagePool) -> int:
        """A page of ``pool``."""
        page = pool.take()
        self._taken.append((pool, page))
        return page

    def own_ring(self, pool: PagePool, ring: int) -> int:
        """The ring itself when nobody else will hold it after the step, else a new one."""
        key = (id(pool), ring)
        if pool.holders(ring) - self._left[key] == 1:
            return ring
        self._left[key] += 1
        return self.take(pool)

    def give_back(self) -> None:
        """Release everything that was taken."""
        for pool, page in self._taken:
            pool.release(page)
        self._taken.clear()
