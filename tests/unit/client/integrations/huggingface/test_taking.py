"""What is written into a directory that is being filled becomes files of the save."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointd.errors import StateError
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.integrations.huggingface.filling import Filled, Filling, current
from checkpointd_client.integrations.huggingface.saving import stepped
from checkpointd_client.integrations.huggingface.taking import Taking


@contextmanager
def filled(folder: Path, memory: set[int] | None = None) -> Iterator[tuple[Path, Taking]]:
    """A directory that this thread fills."""
    taking = Taking(str(folder / "hidden"), memory or set())
    with Filling(
        str(folder / "checkpoint-8"), Filled("00000001-0", str(folder / "hidden")), lambda *_: None, taking.active
    ).active():
        yield folder / "hidden", taking


def test_files_of_tensors_are_taken_and_others_are_written(tmp_path: Path) -> None:
    before = torch.save
    with filled(tmp_path) as (folder, taking):
        torch.save({"w": torch.ones(3)}, folder / "optimizer.pt")
        torch.save({"w": torch.ones(3)}, tmp_path / "elsewhere.pt")
        torch.save({"w": torch.ones(3)}, io.BytesIO())
        torch.save({"w": torch.ones(3)}, folder / "old.pt", _use_new_zipfile_serialization=False)
        (folder / "config.json").write_text("{}")
        files = taking.files()
    assert torch.save is before
    assert files.keys() == {"optimizer.pt"}
    assert {path.name for path in folder.iterdir()} == {"config.json", "old.pt"}
    assert (tmp_path / "elsewhere.pt").is_file()


def test_a_file_is_as_it_was_when_it_was_written_or_the_save_is_refused(tmp_path: Path) -> None:
    """TAKING-1."""
    weights, content = torch.ones(3), {"step": 1}
    with filled(tmp_path) as (folder, taking):
        torch.save(content, folder / "state.pt")
        content["step"] = 2
        torch.save(weights, folder / "weights.pt")
        assert b"step" in bytes(taking.files()["state.pt"].leaves[0].tensor.numpy())
        weights.mul_(2)
        with pytest.raises(StateError, match=r"weights.pt cannot be saved: a tensor changed in place"):
            taking.files()
        torch.save(weights, folder / "weights.pt")  # again, as it is now
        assert taking.files().keys() == {"state.pt", "weights.pt"}


def test_what_is_written_at_once_is_there_and_takes_the_place_of_what_was_taken(tmp_path: Path) -> None:
    """As a method of the user does that writes a file, gives it its name, and reads it."""

    def write(folder: Path) -> None:
        torch.save(torch.ones(3), folder / "head.pt.tmp")
        (folder / "head.pt.tmp").rename(folder / "head.pt")
        assert torch.load(folder / "head.pt").sum() == 3
        torch.save(torch.ones(4), folder / "weights.pt")

    with filled(tmp_path) as (folder, taking):
        torch.save(torch.zeros(4), folder / "weights.pt")
        filling = current()
        assert filling is not None
        filling.written_at_once(write)(folder)
        torch.save(torch.ones(3), folder / "optimizer.pt")
        assert taking.files().keys() == {"optimizer.pt"}
        assert torch.load(folder / "weights.pt").sum() == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_files_of_dcp_are_what_its_reader_reads(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(5, dtype=torch.bfloat16), "step": 7}
    with Checkpointer(tmp_path / ".checkpointd") as ckpt:
        given = core_of(ckpt).fill("checkpoint-8", whole=True)
        taking = Taking(given.path, set())
        filling = Filling(str(tmp_path / "checkpoint-8"), Filled(given.name, given.path), lambda *_: None, taking.active)
        with filling.active():
            writer = dcp.FileSystemWriter(Path(given.path) / "model_0")
            dcp.save(state, storage_writer=writer, no_dist=True)
        files = taking.files()
        assert files.keys() == {"model_0/__0_0.distcp"}
        core_of(ckpt).save_files(8, files, at="checkpoint-8", tag="c8", unfinished=given.name).wait(60)
    found = {"w": torch.zeros(2, 3), "half": torch.zeros(5, dtype=torch.bfloat16), "step": 0}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoint-8" / "model_0"), no_dist=True)
    assert found["step"] == 7
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["half"], state["half"])


def test_steps_change_what_an_optimizer_trains_and_its_own_state_and_no_frozen_parameter() -> None:
    trained, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD([*trained.parameters(), *frozen.parameters()], lr=0.1, momentum=0.9)
    trained(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = stepped((optimizer, None))
    states = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    assert found == {t.untyped_storage().data_ptr() for t in [*trained.parameters(), *states]}
