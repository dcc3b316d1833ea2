"""An attempt that a daemon decides: it is in the catalog, and `latest` follows unless another program has written it."""

from __future__ import annotations

from checkpointd.daemon.roots import in_doubt
from checkpointd.layout.keys import AttemptId, attempt_lease_key
from checkpointd.pipeline.outcome.recover import judge
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.store.memory import MemoryStore
from tests.builders import begin_epoch, leave_in_doubt

TAG = "global_step1"


async def test_an_attempt_that_only_its_lease_shows_is_announced_before_it_is_decided() -> None:
    store = MemoryStore()
    prefix = f"{TAG}/{AttemptId(await begin_epoch(store), 0)}"
    await store.put(attempt_lease_key(prefix), b"")
    [view] = await catalog.attempts_of(store, TAG)
    decided = await in_doubt._decide(store, await judge(store, view))
    assert decided.outcome == "abort"
    known = CatalogLog(store)
    await known.refresh()
    assert known.state.entries[prefix].is_decided


async def test_a_latest_that_another_program_has_written_stays() -> None:
    """Its save may be newer."""
    store = MemoryStore()
    await leave_in_doubt(store, tag=TAG)
    await store.put("global_step20/mp_rank_00_model_states.pt", b"of another program")
    await store.put("latest", b"global_step20")
    [view] = await catalog.attempts_of(store, TAG)
    assert (await in_doubt._decide(store, await judge(store, view))).outcome == "commit"
    assert await store.get("latest") == b"global_step20"
