"""What a load finds in the spool of its node."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from checkpointd.daemon.spool.record import SPOOLED
from checkpointd.store.base import Entry
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.spool_source import NodeSpoolView


class Inline:
    """Runs what the writer thread would."""

    def call(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        asyncio.run(work)


def test_a_shard_that_leaves_the_spool_during_a_look_deserves_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "root").mkdir()

    async def as_it_was(store: PosixStore, prefix: str) -> list[Entry]:
        assert prefix == SPOOLED
        return [Entry("00000001-0-00000-0-uploaded", 400, False)]

    monkeypatch.setattr(PosixStore, "list", as_it_was)
    view = NodeSpoolView(str(tmp_path / "root"), cast(WriterThread, Inline()))
    view.look()
    assert view.offers(0) == ()
    assert caplog.text == ""


def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spooled = tmp_path / "root" / SPOOLED
    spooled.mkdir(parents=True)
    (spooled / "00000001-0-00000-0-torn").write_bytes(b"torn")
    view = NodeSpoolView(str(tmp_path / "root"), cast(WriterThread, Inline()))
    view.look()
    assert view.offers(0) == ()
    assert "a shard in the spool is not used" in caplog.text
