"""Makes the catalog of a root again."""

from __future__ import annotations

import msgspec

from checkpointd.pipeline.root import catalog_mending
from checkpointd.store.base import Store


class CatalogReport(msgspec.Struct, frozen=True, kw_only=True):
    """The number of attempts that the new catalog names."""

    root: str
    attempts: int


async def rebuilt(store: Store) -> CatalogReport:
    """Make the catalog again from the attempts' own objects."""
    return CatalogReport(root=store.url, attempts=await catalog_mending.rebuild(store))
