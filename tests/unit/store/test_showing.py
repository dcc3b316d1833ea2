"""The capability to show plain files: who has it, and that stores without it need say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.errors import StoreError
from checkpointd.layout.log_records import CommitRecord
from checkpointd.layout.manifest import BallotRef
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root.tag_directories import settle, show
from checkpointd.store.base import Store
from checkpointd.store.limited import LimitedStore, TokenBucket
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.showing import SupportsPlainFiles, plain_files_of


def test_the_contract_does_not_ask_for_it() -> None:
    assert not hasattr(Store, "plain_files")
    assert not isinstance(MemoryStore(), SupportsPlainFiles)
    assert plain_files_of(MemoryStore()) is None


def test_a_store_that_passes_calls_on_passes_it_on_as_well(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / ".checkpointd")
    plain = plain_files_of(store)
    assert plain is not None
    assert plain_files_of(LimitedStore(PatientStore(store, Patience(0, 0)), TokenBucket(1e6))) is plain
    assert plain_files_of(PatientStore(MemoryStore(), Patience(0, 0))) is None
    assert plain_files_of(PosixStore(tmp_path / "run")) is None  # it supports it, and not at this root


async def test_files_cannot_be_shown_beside_a_store_without_it() -> None:
    store = MemoryStore()
    commit = CommitRecord(
        attempt="tag/00000001-0",
        n=0,
        step=1,
        world_size=1,
        ballot=BallotRef(digest="0" * 32, size=24),
        shown_at="tag",
        decided_by=0,
        writer=writer(),
    )
    with pytest.raises(StoreError, match="cannot show files beside it"):
        await show(store, commit)
    await settle(store)  # nothing to show
