"""A bound on the bytes that several works hold at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """`total` bytes to hand out; who needs more than all of it waits until nobody else has any, and goes alone."""

    def __init__(self, total: int) -> None:
        self._total = self._left = total
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until there is room for `nbytes`, and give them back at the end of the block."""
        share = min(nbytes, self._total)
        async with self._change:
            await self._change.wait_for(lambda: self._left >= share)
            self._left -= share
        try:
            yield
        finally:
            self._left += share
            async with self._change:
                self._change.notify_all()
