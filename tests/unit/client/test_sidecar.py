"""A Checkpointer of one rank against a sidecar that says what the test wants: what becomes of saves, slots and close()."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.daemon import wire
from checkpointd.daemon.channel import Channel
from checkpointd.errors import AbortedError, SidecarError
from checkpointd.layout.manifest import ErrorReport
from checkpointd_client import Checkpointer, link
from checkpointd_client.arena import Slot
from tests.unit.client.puppet import LIMIT_S, Puppet, well_behaved

COMMITTED = "committed"


@pytest.fixture
def puppet(tmp_path: Path) -> Iterator[Puppet]:
    with Puppet(tmp_path) as puppet:
        yield puppet


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that hangs is lost soon."""
    monkeypatch.setattr(link, "ANSWER_S", 0.25)
    monkeypatch.setattr(link, "GOODBYE_S", 0.1)


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


def _slots() -> list[Slot]:
    return [slot for slot in gc.get_objects() if isinstance(slot, Slot) and hasattr(slot, "image")]


def _until(true: object) -> None:
    assert callable(true)
    never, end = threading.Event(), time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        never.wait(0.002)


def test_what_the_sidecar_gave_back_unsaved_is_not_persisted_with_another_saves_bytes(tmp_path: Path, puppet: Puppet) -> None:
    """The sidecar frees the slot without a vote, the next save takes it, and the sidecar dies: step 1 must not commit 2."""
    root = tmp_path / "root"
    with Checkpointer(root, sidecar=puppet.path) as ckpt:
        one = ckpt.save(1, _state(1.0))
        slot = puppet.expect(wire.Announced).slot
        puppet.expect(wire.Staged)
        other = ckpt.save(2, _state(2.0))
        puppet.say(wire.Free(slot=slot))
        three = ckpt.save(3, _state(3.0))  # waits for the slot
        _until(lambda: puppet.expect(wire.Announced).slot == slot)
        puppet.stop_listening()
        puppet.hang_up()
        with pytest.raises(AbortedError, match="given its memory back"):
            one.wait(LIMIT_S)
        assert other.wait(LIMIT_S).phase == three.wait(LIMIT_S).phase == COMMITTED
        with pytest.raises(AbortedError):
            one.wait()
    assert _loaded(root, 2) == 2.0
    assert _loaded(root, 3) == 3.0


def test_a_refused_save_is_persisted_here_and_its_slot_stays_its_own(
    tmp_path: Path, puppet: Puppet, caplog: pytest.LogCaptureFixture
) -> None:
    """Announced comes after the refused Save, and is refused as well: the link goes on, and the slot is released once."""

    def refuse(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Save | wire.Announced | wire.Staged):
            return wire.Refused(error=ErrorReport(code="ClosedError", message="leaving"), save=message.save)
        return well_behaved(message)

    puppet.reply = refuse
    with caplog.at_level(logging.ERROR, "checkpointd"), Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        for step in range(4):
            assert ckpt.save(step, _state(float(step))).wait(LIMIT_S).phase == COMMITTED
        assert ckpt._arena._busy == 0
        assert ckpt._arena._unmade + len(ckpt._arena._free) == 2
    assert puppet.connections == 1
    assert [_loaded(tmp_path / "root", step) for step in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_refused_snapshot_does_not_keep_its_slot(tmp_path: Path, puppet: Puppet) -> None:
    """The sidecar took the save and refuses what Announced says: it votes no, and never says Free."""

    def refuse(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Announced):
            puppet.say(wire.Refused(error=ErrorReport(code="UsageError", message="no layout"), save=message.save))
            error = ErrorReport(code="AbortedError", message="no layout")
            return wire.Phase(save=message.save, phase="failed", error=error)
        return well_behaved(message)

    puppet.reply = refuse
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        for step in range(4):
            with pytest.raises(AbortedError, match="no layout"):
                ckpt.save(step, _state(float(step))).wait(LIMIT_S)
        _until(lambda: ckpt._arena._busy == 0)


@pytest.mark.usefixtures("quick")
def test_close_does_not_wait_for_a_sidecar_that_hangs(tmp_path: Path, puppet: Puppet) -> None:
    ckpt = Checkpointer(tmp_path / "root", sidecar=puppet.path)
    puppet.reply = lambda _: None
    ended = threading.Thread(target=ckpt.close)
    ended.start()
    ended.join(LIMIT_S)
    assert not ended.is_alive()
    puppet.expect(wire.Leave)


@pytest.mark.usefixtures("quick")
def test_a_sidecar_that_hangs_costs_its_patience_once_and_not_each_save(
    tmp_path: Path, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        puppet.reply = lambda _: None
        puppet.hang_up()
        assert ckpt.save(1, _state(1.0)).wait(LIMIT_S).phase == COMMITTED
        monkeypatch.setattr(link, "ANSWER_S", LIMIT_S)
        ckpt._sidecar._silence = (ckpt._sidecar._silence[0] + 3600.0, ckpt._sidecar._silence[1])  # type: ignore[union-attr,index]
        asked = puppet.connections
        for step in (2, 3, 4):
            assert ckpt.save(step, _state(float(step))).wait(LIMIT_S).phase == COMMITTED
        assert puppet.connections == asked


@pytest.mark.usefixtures("quick")
def test_with_wait_and_no_sidecar_the_save_ends_at_its_deadline(tmp_path: Path, puppet: Puppet) -> None:
    with Checkpointer(tmp_path / "root", sidecar=puppet.path, on_sidecar_loss="wait", commit_timeout_s=0.5) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        puppet.expect(wire.Staged)
        puppet.stop_listening()
        puppet.hang_up()
        with pytest.raises(AbortedError, match=r"was not persisted|no vote"):
            handle.wait(LIMIT_S)
        ckpt.wait(0.0)  # nothing is in flight any more


def test_only_a_hand_that_was_handed_over_is_counted(tmp_path: Path, puppet: Puppet) -> None:
    """The sidecar is away for a while: the hand that the next one gets is the second, however often it was looked for."""
    with Checkpointer(tmp_path / "root", sidecar=puppet.path, on_sidecar_loss="wait") as ckpt:
        handle = ckpt.save(1, _state(1.0))
        puppet.expect(wire.Staged)
        puppet.stop_listening()
        puppet.hang_up()
        looks = []
        original = type(ckpt._sidecar).link

        async def counted(sidecar: object) -> object:
            looks.append(1)
            return await original(sidecar)  # type: ignore[arg-type]

        ckpt._sidecar.link = counted.__get__(ckpt._sidecar)  # type: ignore[method-assign,union-attr]
        _until(lambda: len(looks) >= 3)
        with Puppet(tmp_path / "root") as again:
            ckpt._sidecar.path = again.path  # type: ignore[union-attr]
            save = again.expect(wire.Save)
            assert save.hand == 1
            again.expect(wire.Staged)
            again.say(wire.Phase(save=save.save, phase=COMMITTED))
            assert handle.wait(LIMIT_S).phase == COMMITTED


def test_the_phase_never_goes_back_when_another_hand_begins_again(tmp_path: Path, puppet: Puppet) -> None:
    with Checkpointer(tmp_path / "root", sidecar=puppet.path, on_sidecar_loss="wait") as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = puppet.expect(wire.Save)
        puppet.expect(wire.Staged)
        puppet.say(wire.Phase(save=save.save, phase="prepared"))
        handle.wait("prepared", timeout=LIMIT_S)
        durable_s = handle.timings.durable_s
        puppet.hang_up()
        save = puppet.expect(wire.Save)
        puppet.expect(wire.Staged)
        for phase in ("staged", "persisting", "prepared"):
            puppet.say(wire.Phase(save=save.save, phase=phase))
        puppet.say(wire.Progress(save=save.save, raw_total=8, raw_done=7, stored=5))
        _until(lambda: handle.bytes_stored == 5)
        assert handle.phase == "prepared"
        assert handle.timings.durable_s == durable_s
        puppet.say(wire.Phase(save=save.save, phase=COMMITTED))
        assert handle.wait(LIMIT_S).phase == COMMITTED


def test_a_word_that_is_not_understood_ends_the_link_and_not_the_save(tmp_path: Path, puppet: Puppet) -> None:
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = puppet.expect(wire.Save)
        puppet.expect(wire.Staged)
        puppet.say(wire.Phase(save=save.save, phase="transcended"))
        assert handle.wait(LIMIT_S).phase == COMMITTED
    assert _loaded(tmp_path / "root", 1) == 1.0


def test_slots_that_the_sidecar_was_not_reading_are_used_on_when_it_is_lost(tmp_path: Path, puppet: Puppet) -> None:
    """A slot costs its pages anew each time that it is given up."""

    def commit(message: wire.Message) -> wire.Message | None:
        if isinstance(message, wire.Staged):
            puppet.say(wire.Free(slot=announced[-1].slot))
            return wire.Phase(save=message.save, phase=COMMITTED)
        if isinstance(message, wire.Announced):
            announced.append(message)
        return well_behaved(message)

    announced: list[wire.Announced] = []
    puppet.reply = commit
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        ckpt.save(1, _state(1.0)).wait(LIMIT_S)
        puppet.hang_up()
        _until(lambda: not ckpt.status().sidecar_connected)  # or the second save is lost with the connection, and goes inline
        ckpt.save(2, _state(2.0)).wait(LIMIT_S)
        _until(lambda: ckpt._arena._busy == 0)
        assert len(announced) == 2
        assert {message.slot for message in announced} <= {slot.number for slot in ckpt._arena._free}


def test_a_slot_that_was_lost_is_taken_from_the_next_sidecar_as_well(tmp_path: Path, puppet: Puppet) -> None:
    """Or its memory would stay mapped there, and count, as long as the connection lasts."""
    with Checkpointer(tmp_path / "root", sidecar=puppet.path, on_sidecar_loss="wait") as ckpt:
        handle = ckpt.save(1, _state(1.0))
        puppet.expect(wire.Staged)
        puppet.hang_up()
        save = puppet.expect(wire.Save)
        slot = puppet.expect(wire.Announced).slot
        puppet.say(wire.Phase(save=save.save, phase=COMMITTED))
        handle.wait(LIMIT_S)
        puppet.say(wire.Free(slot=slot))
        assert puppet.expect(wire.DropSlot).slot == slot


def test_the_end_and_the_hanging_up_together_release_the_slot(tmp_path: Path, puppet: Puppet) -> None:
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = puppet.expect(wire.Save)
        puppet.expect(wire.Staged)
        puppet.say(wire.Phase(save=save.save, phase=COMMITTED))
        puppet.hang_up()
        assert handle.wait(LIMIT_S).phase == COMMITTED
        _until(lambda: ckpt._arena._busy == 0)


def test_what_is_no_sidecar_is_named_on_this_rank(tmp_path: Path, puppet: Puppet) -> None:
    def shout(_: wire.Message) -> None:
        puppet.say_bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    puppet.reply = shout
    with pytest.raises(SidecarError, match="is no sidecar"):
        Checkpointer(tmp_path / "root", sidecar=puppet.path)


def test_who_is_turned_away_before_a_word_hears_why(tmp_path: Path, puppet: Puppet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end is closed when the hello is sent; what it said before is there to be read."""
    puppet.turned_away = wire.Refused(error=ErrorReport(code="UsageError", message="user 7 may not"), save=None)
    send = Channel.send

    async def late(channel: Channel, message: wire.Message, descriptor: int | None = None) -> None:
        while puppet.connections == 0 or puppet.is_listening_to_one:
            await asyncio.sleep(0)
        with pytest.raises(BrokenPipeError):
            await send(channel, message, descriptor)
        raise BrokenPipeError

    monkeypatch.setattr(Channel, "send", late)
    with pytest.raises(SidecarError, match="refused: user 7 may not"):
        Checkpointer(tmp_path / "root", sidecar=puppet.path)


def test_the_slot_of_the_second_save_is_made_ready_after_the_first(tmp_path: Path, puppet: Puppet) -> None:
    """The sidecar keeps the first one's snapshot where it is."""
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        handle = ckpt.save(1, _state(1.0))
        save = puppet.expect(wire.Save)
        puppet.expect(wire.Staged)
        _until(lambda: ckpt._arena.allocated_bytes >= 64 * 64 * 4)
        assert ckpt._arena._unmade == 0
        puppet.say(wire.Phase(save=save.save, phase=COMMITTED))
        assert handle.wait(LIMIT_S).phase == COMMITTED


@pytest.mark.parametrize("what", [wire.Slot, wire.Layout])
def test_a_snapshot_that_the_sidecar_has_no_room_for_is_persisted_here(tmp_path: Path, puppet: Puppet, what: type) -> None:
    """It is told of the save only when it has taken slot and layout: it never votes on what it cannot read."""
    said: list[wire.Message] = []

    def refuse(message: wire.Message) -> wire.Message | None:
        said.append(message)
        if isinstance(message, what):
            return wire.Refused(error=ErrorReport(code="UsageError", message="no room"), save=None)
        return well_behaved(message)

    puppet.reply = refuse
    with Checkpointer(tmp_path / "root", sidecar=puppet.path) as ckpt:
        for step in range(3):
            assert ckpt.save(step, _state(float(step))).wait(LIMIT_S).phase == COMMITTED
        assert ckpt._arena._busy == 0
    assert puppet.connections == 1
    assert not [message for message in said if isinstance(message, wire.Save)]
    assert [_loaded(tmp_path / "root", step) for step in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("well", [True, False])
def test_only_a_trainer_that_ends_well_lets_its_snapshot_go(tmp_path: Path, puppet: Puppet, well: bool) -> None:
    """After an error somebody starts it again."""
    with contextlib.suppress(ZeroDivisionError), Checkpointer(tmp_path / "root", sidecar=puppet.path):
        if not well:
            raise ZeroDivisionError
    assert any(isinstance(message, wire.Leave) for message in puppet.heard()) == well
