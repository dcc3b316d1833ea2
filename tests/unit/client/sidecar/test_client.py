"""A Checkpointer of one rank against a sidecar that says what the test wants: what becomes of saves, slots and close()."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkpointd import waits
from checkpointd.config import Ranks
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel
from checkpointd.errors import AbortedError, SidecarError, StoreError, WaitTimeoutError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.store.memory import MemoryStore
from checkpointd_client import Checkpointer
from checkpointd_client.sidecar import client, link
from tests.unit.client.scripted_sidecar import LIMIT_S, ScriptedSidecar, well_behaved

COMMITTED = "committed"
REJOIN_S, LOOK_S = 2.718, 3.142
"""No other pauses are as long."""


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(tmp_path) as sidecar:
        yield sidecar


@pytest.fixture(autouse=True)
def no_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sidecar that hangs does not answer in time."""
    monkeypatch.setattr(link, "ANSWER_S", LIMIT_S)
    monkeypatch.setattr(link, "GOODBYE_S", LIMIT_S)


def _state(value: float) -> dict[str, object]:
    return {"w": torch.full((64, 64), value)}


def _loaded(root: Path, step: int) -> float:
    """What the checkpoint of `step` holds, every element the same."""
    target = _state(-1.0)
    with Checkpointer(root) as ckpt:
        assert ckpt.load(target, tag=f"global_step{step}") is not None
    weights = target["w"]
    assert isinstance(weights, torch.Tensor)
    assert bool((weights == weights[0, 0]).all())
    return float(weights[0, 0])


def _until(true: object) -> None:
    assert callable(true)
    never, end = threading.Event(), time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        never.wait(0.002)


def _tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each try to connect to a sidecar."""
    tries, opened = list[str](), link.Link.open

    async def counted(path: str, uid: int | None) -> link.Link:
        tries.append(path)
        return await opened(path, uid)

    monkeypatch.setattr(link.Link, "open", counted)
    return tries


def test_saves_in_the_hands_of_a_sidecar_that_is_lost_fail_by_its_name_and_the_next_one_is_persisted_here(
    tmp_path: Path, sidecar: ScriptedSidecar
) -> None:
    """SIDECAR-1: nobody else writes their shards. Their slots are free."""
    root = tmp_path / "root"
    with Checkpointer(root, sidecar=sidecar.path) as ckpt:
        one = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.PhaseEntered(save=save.save, phase="persisting"))
        one.wait("persisting", timeout=LIMIT_S)
        two = ckpt.save(2, _state(2.0))
        sidecar.expect(wire.Staged)
        two.wait("staged", timeout=LIMIT_S)
        sidecar.stop_listening()
        sidecar.hang_up()
        for handle, phase in ((one, "persisting"), (two, "staged")):
            words = (
                f"{sidecar.path} was lost while this save was {phase}: the sidecar has closed the connection; training goes on"
            )
            with pytest.raises(SidecarError, match=words):
                handle.wait(LIMIT_S)
            assert handle.phase == "failed"
        assert ckpt.save(3, _state(3.0)).wait(LIMIT_S).phase == COMMITTED
        _until(lambda: ckpt._core._arena._holds == [])
    assert _loaded(root, 3) == 3.0


def test_a_refused_save_is_persisted_here_and_its_slot_stays_its_own(
    tmp_path: Path, sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """Announced comes after the refused Save, and is refused as well: the link goes on, and the slot is released once."""

    def refuse(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Save | wire.Announced | wire.Staged):
            return wire.Refused(error=ErrorReport(code="ClosedError", message="leaving"), save=message.save)
        return well_behaved(message)

    sidecar.reply = refuse
    with caplog.at_level(logging.ERROR, "checkpointd"), Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        for step in range(4):
            assert ckpt.save(step, _state(float(step))).wait(LIMIT_S).phase == COMMITTED
        _until(lambda: ckpt._core._arena._holds == [])
    assert sidecar.connections == 1
    assert [_loaded(tmp_path / "root", step) for step in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_refused_snapshot_does_not_keep_its_slot(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    """The sidecar took the save and refuses what Announced says: it votes no, and never says Free."""

    def refuse(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Announced):
            sidecar.say(wire.Refused(error=ErrorReport(code="UsageError", message="no layout"), save=message.save))
            error = ErrorReport(code="AbortedError", message="no layout")
            return wire.PhaseEntered(save=message.save, phase="failed", error=error)
        return well_behaved(message)

    sidecar.reply = refuse
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        for step in range(4):
            with pytest.raises(AbortedError, match="no layout"):
                ckpt.save(step, _state(float(step))).wait(LIMIT_S)
        _until(lambda: ckpt._core._arena._holds == [])


def test_close_does_not_wait_for_a_sidecar_that_hangs(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(tmp_path / "root", sidecar=sidecar.path)
    sidecar.reply = lambda _: None
    monkeypatch.setattr(link, "GOODBYE_S", 0.1)
    ended = threading.Thread(target=ckpt.close)
    ended.start()
    ended.join(LIMIT_S)
    assert not ended.is_alive()
    sidecar.expect(wire.Leave)


def test_a_sidecar_that_hangs_costs_its_patience_once_and_not_each_save(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = _tries(monkeypatch)
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        sidecar.reply = lambda _: None
        monkeypatch.setattr(link, "ANSWER_S", 0.25)
        sidecar.hang_up()
        _until(lambda: not ckpt.status().sidecar_connected)  # or the save is lost with the connection
        assert ckpt.save(1, _state(1.0)).wait(LIMIT_S).phase == COMMITTED
        monkeypatch.setattr(link, "ANSWER_S", LIMIT_S)
        ckpt._core._sidecar._silence = (ckpt._core._sidecar._silence[0] + 3600.0, ckpt._core._sidecar._silence[1])  # type: ignore[union-attr,index]
        asked = len(tries)
        for step in (2, 3, 4):
            assert ckpt.save(step, _state(float(step))).wait(LIMIT_S).phase == COMMITTED
        assert len(tries) == asked


def test_a_spooled_save_waits_for_the_next_sidecar_and_its_phase_never_goes_back(
    tmp_path: Path, sidecar: ScriptedSidecar
) -> None:
    """SIDECAR-3"""
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        for phase in ("persisting", "spooled", "uploading"):
            sidecar.say(wire.PhaseEntered(save=save.save, phase=phase))
        handle.wait("uploading", timeout=LIMIT_S)
        spooled_s = handle.timings.spooled_s
        sidecar.hang_up()
        save = sidecar.expect(wire.Save)
        assert save.spooled
        _until(lambda: ckpt._core._arena._holds == [])
        sidecar.say(wire.PhaseEntered(save=save.save, phase="spooled"))
        sidecar.say(wire.Progress(save=save.save, raw_total=8, raw_done=7, stored=5))
        _until(lambda: handle.bytes_stored == 5)
        assert (handle.phase, handle.timings.spooled_s) == ("uploading", spooled_s)
        sidecar.say(wire.PhaseEntered(save=save.save, phase=COMMITTED))
        assert handle.wait(LIMIT_S).phase == COMMITTED


def test_a_spooled_save_that_the_next_sidecar_has_not_got_fails(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    """SIDECAR-3"""
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.PhaseEntered(save=save.save, phase="spooled"))
        handle.wait("spooled", timeout=LIMIT_S)
        forgot = ErrorReport(code="NotFoundError", message="the spool of this daemon does not have it")
        sidecar.reply = lambda m: wire.Refused(error=forgot, save=m.save) if isinstance(m, wire.Save) else well_behaved(m)
        sidecar.hang_up()
        with pytest.raises(SidecarError, match=r"was lost while this save was spooled: .* does not have it"):
            handle.wait(LIMIT_S)


def test_a_sidecar_that_does_not_reach_the_root_is_named_everywhere(
    tmp_path: Path, sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_REJOIN_S_MIN", 10 * LIMIT_S)  # this one answers every look that all is well
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        assert ckpt.status().sidecar_trouble == ""
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        told = wire.Progress(save=save.save, raw_total=8, raw_done=7, stored=5, trouble="Connection refused")
        for _ in range(3):
            sidecar.say(told)
        _until(lambda: ckpt.status().sidecar_trouble == "Connection refused")
        with pytest.raises(WaitTimeoutError, match="the sidecar does not reach the root: Connection refused"):
            handle.wait(timeout=0)
        assert caplog.text.count("the sidecar does not reach the root: Connection refused") == 1
        lost = ErrorReport(code="StoreError", message="no outcome can be read", phase="")
        sidecar.say(wire.PhaseEntered(save=save.save, phase="failed", error=lost))
        words = "no outcome can be read; the sidecar does not reach the root: Connection refused"
        with pytest.raises(StoreError, match=words):
            handle.wait(LIMIT_S)
        other = ckpt.save(2, _state(2.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.Progress(save=save.save, raw_total=8, raw_done=7, stored=5))
        _until(lambda: ckpt.status().sidecar_trouble == "")
        sidecar.say(wire.PhaseEntered(save=save.save, phase=COMMITTED))
        other.wait(LIMIT_S)


def test_a_trouble_that_is_over_is_forgotten_although_no_save_is_in_flight(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_REJOIN_S_MIN", 0.01)
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.Progress(save=save.save, raw_total=8, raw_done=7, stored=5, trouble="Connection refused"))
        lost = ErrorReport(code="StoreError", message="no outcome can be read", phase="")
        sidecar.say(wire.PhaseEntered(save=save.save, phase="failed", error=lost))
        with pytest.raises(StoreError, match="does not reach the root"):
            handle.wait(LIMIT_S)
        _until(lambda: ckpt.status().sidecar_trouble == "")


def test_a_word_that_is_not_understood_ends_the_link(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.PhaseEntered(save=save.save, phase="transcended"))
        with pytest.raises(SidecarError, match="sent a message that this process does not understand"):
            handle.wait(LIMIT_S)


def test_a_save_that_failed_for_no_reason_given_ends_with_an_error(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    """It was an AssertionError without a word in the trainer."""
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.PhaseEntered(save=save.save, phase="failed"))
        with pytest.raises(SidecarError, match="the sidecar calls it failed and does not say why"):
            handle.wait(LIMIT_S)


def test_slots_that_the_sidecar_was_not_reading_are_used_on_when_it_is_lost(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    """A slot costs its pages anew each time that it is given up."""

    def commit(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Staged):
            sidecar.say(wire.Free(slot=announced[-1].slot))
            return wire.PhaseEntered(save=message.save, phase=COMMITTED)
        if isinstance(message, wire.Announced):
            announced.append(message)
        return well_behaved(message)

    announced: list[wire.Announced] = []
    sidecar.reply = commit
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        ckpt.save(1, _state(1.0)).wait(LIMIT_S)
        sidecar.hang_up()
        _until(lambda: not ckpt.status().sidecar_connected)  # or the second save is lost with the connection
        ckpt.save(2, _state(2.0)).wait(LIMIT_S)
        _until(lambda: ckpt._core._arena._holds == [])
        assert len(announced) == 2
        assert {message.slot for message in announced} <= {slot.number for slot in ckpt._core._arena._free}


def test_a_slot_that_a_lost_sidecar_may_still_read_is_given_to_no_other(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        lost = ckpt.save(1, _state(1.0))
        slot = sidecar.expect(wire.Announced).slot
        sidecar.expect(wire.Staged)
        sidecar.hang_up()
        with pytest.raises(SidecarError, match="was lost while this save was staged"):
            lost.wait(LIMIT_S)
        for step in (2, 3):  # one for each slot
            handle = ckpt.save(step, _state(float(step)))
            save = sidecar.expect(wire.Save)
            assert sidecar.expect(wire.Announced).slot != slot
            sidecar.expect(wire.Staged)
            sidecar.say(wire.PhaseEntered(save=save.save, phase=COMMITTED))
            handle.wait(LIMIT_S)


def test_the_end_and_the_hanging_up_together_release_the_slot(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        sidecar.say(wire.PhaseEntered(save=save.save, phase=COMMITTED))
        sidecar.hang_up()
        assert handle.wait(LIMIT_S).phase == COMMITTED
        _until(lambda: ckpt._core._arena._holds == [])


def test_what_is_no_sidecar_is_named_on_this_rank(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    def shout(_: wire.Message) -> None:
        sidecar.say_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    sidecar.reply = shout
    with pytest.raises(SidecarError, match="is not a sidecar"):
        Checkpointer(tmp_path / "root", sidecar=sidecar.path)


def test_who_is_turned_away_before_a_word_hears_why(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end is closed when the hello is sent; what it said before is there to be read."""
    sidecar.turned_away = wire.Refused(error=ErrorReport(code="UsageError", message="user 7 may not"), save=None)
    send = Channel.send

    async def late(channel: Channel, message: wire.Message, descriptor: int | None = None) -> None:
        while sidecar.connections == 0 or sidecar.is_listening_to_one:
            await asyncio.sleep(0)
        with pytest.raises(BrokenPipeError):
            await send(channel, message, descriptor)
        raise BrokenPipeError

    monkeypatch.setattr(Channel, "send", late)
    with pytest.raises(SidecarError, match="refused: user 7 may not"):
        Checkpointer(tmp_path / "root", sidecar=sidecar.path)


def test_the_slot_of_the_second_save_is_made_ready_after_the_first(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    """The sidecar keeps the first one's snapshot where it is."""
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = sidecar.expect(wire.Save)
        sidecar.expect(wire.Staged)
        _until(lambda: sum(slot.capacity for slot in ckpt._core._arena._free) >= 64 * 64 * 4)
        assert len(ckpt._core._arena._slots) == 2
        sidecar.say(wire.PhaseEntered(save=save.save, phase=COMMITTED))
        assert handle.wait(LIMIT_S).phase == COMMITTED


@pytest.mark.parametrize("what", [wire.Slot, wire.Layout])
def test_a_snapshot_that_the_sidecar_has_no_room_for_is_persisted_here(
    tmp_path: Path, sidecar: ScriptedSidecar, what: type
) -> None:
    """It is told of the save only when it has taken slot and layout: it never votes on what it cannot read."""
    said: list[wire.Message] = []

    def refuse(message: wire.Message) -> wire.Message | None:
        said.append(message)
        if isinstance(message, what):
            return wire.Refused(error=ErrorReport(code="UsageError", message="no room"), save=None)
        return well_behaved(message)

    sidecar.reply = refuse
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        for step in range(3):
            assert ckpt.save(step, _state(float(step))).wait(LIMIT_S).phase == COMMITTED
        _until(lambda: ckpt._core._arena._holds == [])
    assert sidecar.connections == 1
    assert not [message for message in said if isinstance(message, wire.Save)]
    assert [_loaded(tmp_path / "root", step) for step in range(3)] == [0.0, 1.0, 2.0]


def test_the_trainers_log_says_that_there_was_no_progress(
    tmp_path: Path, sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """The sidecar's own log is where nobody looks."""

    def commit(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Staged):
            sidecar.say(wire.Progress(save=message.save, raw_total=8, raw_done=8, stored=8, no_progress=True))
            return wire.PhaseEntered(save=message.save, phase=COMMITTED)
        return well_behaved(message)

    sidecar.reply = commit
    with (
        caplog.at_level(logging.WARNING, "checkpointd"),
        Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt,
    ):
        assert ckpt.save(3, _state(1.0)).wait(LIMIT_S).no_progress
    assert caplog.text.count("the step moved on to 3, but no tensor that requires grad has changed") == 1


@pytest.mark.parametrize("well", [True, False])
def test_only_a_trainer_that_ends_well_lets_its_snapshot_go(tmp_path: Path, sidecar: ScriptedSidecar, well: bool) -> None:
    """After an error somebody starts it again."""
    with contextlib.suppress(ZeroDivisionError), Checkpointer(tmp_path / "root", sidecar=sidecar.path):
        if not well:
            raise ZeroDivisionError
    assert any(isinstance(message, wire.Leave) for message in sidecar.heard()) == well


def test_a_trainer_that_saves_seldom_joins_a_sidecar_that_was_started_anew(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a save: until then the sidecar would not know that there is a job."""
    monkeypatch.setattr(client, "_REJOIN_S_MIN", 0.01)
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        begun = sidecar.expect(wire.Begin)
        sidecar.hang_up()
        assert sidecar.expect(wire.Join).root == str(tmp_path / "root")
        assert sidecar.expect(wire.Begin) == begun
        ckpt.save(1, _state(1.0))
        sidecar.say(wire.PhaseEntered(save=sidecar.expect(wire.Staged).save, phase=COMMITTED))
        assert sidecar.connections == 2


def test_a_sidecar_that_stays_away_is_asked_for_in_silence_and_until_close(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = _tries(monkeypatch)
    monkeypatch.setattr(client, "_REJOIN_S_MIN", 0.01)
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        assert ckpt._core._sidecar is not None
        rejoining = ckpt._core._sidecar._rejoining
        sidecar.expect(wire.Begin)
        sidecar.stop_listening()
        sidecar.hang_up()
        _until(lambda: len(tries) > 2)
    assert rejoining is not None
    assert rejoining.done()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


FULL = wire.Refused(error=ErrorReport(code="SidecarFullError", message="all connections for ranks are taken (256)"))


def test_a_full_sidecar_at_the_start_keeps_no_trainer_from_training(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    """It counts as lost: saves are persisted here, and the sidecar is asked again by each."""
    sidecar.turned_away = FULL
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path, on_sidecar_loss="inline") as ckpt:
        ckpt.save(1, _state(1.0)).wait()
        before = sidecar.connections
        ckpt.save(2, _state(2.0)).wait()
        assert sidecar.connections > before
    assert _loaded(tmp_path / "root", 2) == 2.0


UNSEEN = wire.Refused(error=ErrorReport(code="RootGoneError", message="this daemon does not see that the job began there"))


def sees_nothing(message: wire.Message) -> wire.Message | None:
    return UNSEEN if isinstance(message, wire.Begin) else well_behaved(message)


def _pauses_end(monkeypatch: pytest.MonkeyPatch, length_s: float, may_end: Callable[[], bool]) -> None:
    """Pauses of this length end when they may, and then at once."""
    pause = asyncio.sleep

    async def sleep(seconds: float) -> None:
        while seconds == length_s and not may_end():
            await pause(0.005)
        await pause(0.0 if seconds == length_s else seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)


def test_a_sidecar_that_does_not_see_the_job_at_its_root_counts_as_lost(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is handed nothing, and asked again beside the saves: proving that takes seconds, which each would wait."""
    soon, heard = threading.Event(), set[type]()

    def reply(message: wire.Message) -> wire.Message | None:
        heard.add(type(message))
        return sees_nothing(message)

    monkeypatch.setattr(client, "_REJOIN_S_MIN", REJOIN_S)
    _pauses_end(monkeypatch, REJOIN_S, soon.is_set)
    sidecar.reply = reply
    with (
        caplog.at_level(logging.WARNING, "checkpointd"),
        Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt,
    ):
        [said] = caplog.messages
        assert "does not see that the job began there; this process persists its saves itself meanwhile" in said
        assert not ckpt.status().sidecar_connected
        assert ckpt.save(1, _state(1.0)).wait(LIMIT_S).phase == COMMITTED
        assert len(caplog.messages) == 1
        assert heard == {wire.Hello, wire.Join, wire.Begin, wire.Look}
        assert sidecar.connections == 1
        sidecar.reply = well_behaved
        soon.set()
        _until(lambda: ckpt.status().sidecar_connected)
        handle = ckpt.save(2, _state(2.0))
        sidecar.say(wire.PhaseEntered(save=sidecar.expect(wire.Staged).save, phase=COMMITTED))
        assert handle.wait(LIMIT_S).phase == COMMITTED
    assert _loaded(tmp_path / "root", 1) == 1.0


def test_a_sidecar_that_falls_silent_at_the_start_holds_nobody(
    tmp_path: Path, sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer to the start is waited for as long as any other one, out loud, and the saves do not wait again."""
    begun_at, said = list[int](), f"the sidecar at {sidecar.path} has not answered"

    def silent(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Begin):
            sidecar.reply = lambda _: None
            begun_at.append(len(caplog.messages))
        return well_behaved(message)

    monkeypatch.setattr(waits, "FIRST_REPORT_S", 0.1)
    monkeypatch.setattr(link, "ANSWER_S", link._LOOKS * LOOK_S)
    _pauses_end(monkeypatch, link.ANSWER_S / link._LOOKS, lambda: bool(begun_at) and said in caplog.text)
    sidecar.reply = silent
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt:
        assert not ckpt.status().sidecar_connected
        ckpt._core._sidecar._silence = (ckpt._core._sidecar._silence[0] + 3600.0, ckpt._core._sidecar._silence[1])  # type: ignore[union-attr,index]
        assert ckpt.save(1, _state(1.0)).wait(LIMIT_S).phase == COMMITTED
        assert sidecar.connections == 1
    assert said in caplog.messages[begun_at[0]]  # and not that the storage is silent


def test_a_sidecar_that_does_not_see_the_job_stops_the_start_where_its_loss_is_an_error(
    tmp_path: Path, sidecar: ScriptedSidecar
) -> None:
    sidecar.reply = sees_nothing
    with pytest.raises(SidecarError, match="does not see that the job began there"):
        Checkpointer(tmp_path / "root", sidecar=sidecar.path, on_sidecar_loss="raise")


def test_where_its_loss_is_an_error_a_save_says_why_the_sidecar_does_not_take_it(
    tmp_path: Path, sidecar: ScriptedSidecar
) -> None:
    with Checkpointer(tmp_path / "root", sidecar=sidecar.path, on_sidecar_loss="raise") as ckpt:
        sidecar.expect(wire.Begin)
        sidecar.reply = sees_nothing
        sidecar.hang_up()
        _until(lambda: not ckpt.status().sidecar_connected)  # or the first reason is the lost connection
        words = (
            "does not take this save: .*does not see that the job began there; training goes on, and saves of this rank fail"
        )
        with pytest.raises(SidecarError, match=words):
            ckpt.save(1, _state(1.0)).wait(LIMIT_S)


def test_a_sidecar_that_is_lost_is_said_once_and_not_with_each_save(
    tmp_path: Path, sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """And again where the cause is another one."""
    sidecar.turned_away = FULL
    with (
        caplog.at_level(logging.WARNING, "checkpointd"),
        Checkpointer(tmp_path / "root", sidecar=sidecar.path) as ckpt,
    ):
        for step in range(3):
            ckpt.save(step, _state(1.0)).wait()
        [said] = caplog.records
        assert said.levelname == "WARNING"
        assert "are taken (256); this process persists its saves itself meanwhile" in said.getMessage()
        sidecar.turned_away = wire.Refused(error=ErrorReport(code="SidecarFullError", message="user 0 has taken its share"))
        ckpt.save(3, _state(1.0)).wait()
        assert len(caplog.records) == 2


def test_a_full_sidecar_at_the_start_where_its_loss_is_an_error(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    sidecar.turned_away = FULL
    with pytest.raises(SidecarError, match="connections for ranks are taken"):
        Checkpointer(tmp_path / "root", sidecar=sidecar.path, on_sidecar_loss="raise")


async def test_a_trainer_that_said_that_the_sidecar_is_lost_says_once_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    one = client.SidecarClient("/nowhere", MemoryStore("root"), Ranks(), "inline")
    one.say_back()
    assert caplog.messages == []
    one.say_lost(link.LinkLost("the sidecar has closed the connection"))
    one.say_back()
    one.say_back()
    assert caplog.messages[1:] == ["the sidecar at /nowhere is back, and takes the saves from here on"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}, "whoever saw the loss sees its end"


async def test_a_connection_that_this_trainer_closes_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    one = client.SidecarClient("/nowhere", MemoryStore("root"), Ranks(), "inline")
    one.say_lost(link.LinkLost("the sidecar has closed the connection"))
    assert len(caplog.messages) == 1
    await one.close(ends_well=True)
    one.say_lost(link.LinkLost("this trainer has closed the connection"))
    assert len(caplog.messages) == 1
