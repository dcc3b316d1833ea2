"""An archive that two programs might read in two ways is refused, whoever opens it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointd.errors import DamagedError, FormatError
from checkpointd_client.capture import pickled
from checkpointd_client.integrations.conversion.objects import NotPlain, node_of
from checkpointd_client.integrations.deepspeed.offline import safe_unpickle
from checkpointd_client.unpickling import archive
from checkpointd_client.unpickling.archive import ArchiveEntry, entries_of
from checkpointd_client.unpickling.records import PickleFault, PickleLimit
from tests.unit.client.unpickling import zips


def saved() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": [1, "x"]}, file)
    return file.getvalue()


def test_entries_of_torch_save() -> None:
    data = saved()
    found = entries_of(io.BytesIO(data))
    assert {f"archive/{name}": data[e.offset : e.offset + e.size] for name, e in found.items()} == zips.members(data)
    assert found["data/0"].size == 24


def test_archives_that_others_write_again() -> None:
    data = zips.zipped(zips.members(saved()))
    assert entries_of(io.BytesIO(data))["data.pkl"] == ArchiveEntry(46, len(zips.members(data)["archive/data.pkl"]))


@pytest.mark.parametrize("change", zips.AMBIGUOUS, ids=lambda change: change.__name__)
def test_an_archive_with_two_meanings_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    data = change(saved())
    with pytest.raises(PickleFault):
        entries_of(io.BytesIO(data))
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(data)
    with pytest.raises(DamagedError, match="cannot be read as a file of torch"):
        safe_unpickle.read(str(tmp_path / "mp_rank_00_model_states.pt"))
    with pytest.raises(NotPlain):
        node_of(data, "x")
    with pytest.raises(FormatError, match="did not write"):
        pickled.loaded(data, "x", opt_in="weights_only=False")


@pytest.mark.parametrize("size", [0, 1, 21, 22, 90])
def test_what_is_cut_off(size: int) -> None:
    with pytest.raises(PickleFault):
        entries_of(io.BytesIO(saved()[-size:] if size else b""))


def test_every_length_of_a_file_but_its_own_is_refused() -> None:
    data = saved()
    for size in range(0, len(data), 7):
        with pytest.raises(PickleFault):
            entries_of(io.BytesIO(data[:size]))


def test_a_directory_that_would_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "DIRECTORY_BYTES_MAX", 100)
    with pytest.raises(PickleLimit, match="more than 100"):
        entries_of(io.BytesIO(saved()))


def test_files_of_torch_before_1_6_are_told() -> None:
    file = io.BytesIO()
    torch.save({"a": 1}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(PickleFault, match=r"torch before 1\.6 wrote it"):
        entries_of(file)
