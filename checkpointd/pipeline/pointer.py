"""Moving `latest`: only after the outcome, and only forward."""

from __future__ import annotations

from checkpointd.commit.retention import Order, moves_latest
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import LATEST, is_tag
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import LATEST_BYTES_MAX
from checkpointd.store.base import Store


async def move_latest(store: Store, tag: str, order: Order) -> bool:
    """Point `latest` at `tag`, whose commit has `order`, unless it names a newer checkpoint already; whether it was moved."""
    while True:
        current = await _content(store)
        if current == f"{tag}\n".encode():
            return False
        if not moves_latest(await _order_of(store, current), order):
            return False
        if await store.put_if_match(LATEST, current, f"{tag}\n".encode()):
            return True


async def _content(store: Store) -> bytes | None:
    try:
        return await store.get(LATEST, size_max=LATEST_BYTES_MAX)
    except NotFoundError:
        return None


async def _order_of(store: Store, content: bytes | None) -> Order | None:
    """The order of the checkpoint that the pointer names; None where it names none, so that any commit may replace it."""
    tag = (content or b"").decode(errors="replace").removesuffix("\n")
    if not is_tag(tag):
        return None
    try:
        return (await catalog.find(store, tag)).outcome.order
    except (NotFoundError, DamagedError):
        return None
