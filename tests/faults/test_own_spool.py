"""`spool=` of a Checkpointer: the daemon that it starts has the spool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.errors import ClosedError, SupersededError, UsageError
from checkpointd_client import Checkpointer, SpoolConfig, loader
from tests.faults.daemons import OwnDaemons
from tests.faults.jobs import wait_until
from tests.unit.client.shown_files import example, save

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def daemons(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnDaemons]:
    with OwnDaemons(monkeypatch) as daemons:
        yield daemons


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((900, 100), float(step)), "bias": torch.arange(7) + step}}


def into() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(900, 100), "bias": torch.zeros(7, dtype=torch.int64)}}


def held(folder: Path, **settings: Any) -> SpoolConfig:
    """A spool whose uploads do not end."""
    return SpoolConfig(directory=str(folder / "spool"), bandwidth_bps=1.0, **settings)


def test_a_save_climbs_each_rung(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", spool=tmp_path / "spool") as ckpt:
        handle = ckpt.save(1, state(1))
        assert handle.wait("spooled").was_spooled
        handle.wait()
        timings = handle.timings
        assert timings.spooled_s is not None
        assert timings.durable_s is not None
        assert timings.committed_s is not None
        assert timings.spooled_s <= timings.durable_s <= timings.committed_s
        assert (handle.bytes_uploaded, handle.progress) == (handle.bytes_to_upload, 1.0)
        assert handle.bytes_to_upload > 900 * 100 * 4


def test_the_next_start_finds_what_lies_in_the_spool_although_the_daemon_was_killed(
    tmp_path: Path, daemons: OwnDaemons
) -> None:
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path))
    handles = [ckpt.save(step, state(step)).wait("spooled") for step in range(1, 6)]
    assert {handle.phase for handle in handles[1:]} == {"spooled"}
    wait_until(lambda: all(handle.bytes_to_upload > 900 * 100 * 4 for handle in handles), "all are to be uploaded")
    assert {handle.bytes_uploaded for handle in handles[1:]} == {0}
    ckpt.close()
    with pytest.raises(ClosedError, match="the sidecar uploads it"):
        handles[0].wait()
    daemons.kill()
    with Checkpointer(tmp_path / "root", spool=str(tmp_path / "spool")) as again:
        loaded = again.load(target := into())
        assert loaded is not None
        assert loaded.step == 5
        assert torch.equal(target["model"]["weight"], state(5)["model"]["weight"])
        again.save(6, state(6)).wait()
    with Checkpointer(tmp_path / "root", afresh=True) as without:
        assert [one.step for one in without.list()][:1] == [6]


def test_superseded_saves_are_no_failures(tmp_path: Path) -> None:
    spool = SpoolConfig(directory=str(tmp_path / "spool"), bandwidth_bps=300_000.0, keep="newest")
    with Checkpointer(tmp_path / "root", spool=spool) as ckpt:
        first = ckpt.save(1, state(1)).wait("uploading")
        waits = ckpt.save(2, state(2)).wait("spooled")
        kept = ckpt.save(3, state(3), required=True).wait("spooled")
        newest = ckpt.save(4, state(4)).wait()
        with pytest.raises(SupersededError, match="superseded in the spool by global_step4"):
            waits.wait()
        kept.wait()
        assert [one.phase for one in (first, waits, kept, newest)] == ["committed", "superseded", "committed", "committed"]
        status = ckpt.status()
        assert (status.saves_failed, status.saves_superseded) == (0, 1)


def test_a_load_aborts_nothing_that_still_waits_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemons: OwnDaemons
) -> None:
    """What only waits there has no lease."""
    with Checkpointer(tmp_path / "root", spool=tmp_path / "spool") as ckpt:
        ckpt.save(1, state(1)).wait()
    daemons.kill()
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path))
    ckpt.load(into())
    ckpt.save(2, state(2)).wait("spooled")
    ckpt.close()
    monkeypatch.setattr(loader, "VOTES_S", 0.1)
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path), commit_timeout_s=6.0)
    loaded = ckpt.load(into(), tag="global_step1")
    assert loaded is not None
    assert loaded.step == 1
    ckpt.close()
    daemons.kill()
    with Checkpointer(tmp_path / "root", spool=tmp_path / "spool") as again:
        loaded = again.load(into())
        assert loaded is not None
        assert loaded.step == 2, "it was not aborted"


def test_files_go_through_the_spool_and_are_shown_at_the_commit(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run" / ".checkpointd", spool=tmp_path / "spool") as ckpt:
        files = example()
        shown = save(ckpt, files)
        assert sorted(path.name for path in shown.iterdir()) == sorted(files)
        assert ckpt.status().attempts[-1].bytes_uploaded > 0
        for name in files:
            torch.load(shown / name, weights_only=True)


def test_a_sidecar_that_the_user_starts_has_its_own_spool(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with a sidecar, the spool is the sidecar's"):
        Checkpointer(tmp_path / "root", sidecar=tmp_path / "socket", spool=tmp_path / "spool")
