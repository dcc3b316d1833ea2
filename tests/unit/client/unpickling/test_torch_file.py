"""Files of torch.save are read as torch reads them, from the file that was checked, and nothing in them runs."""

from __future__ import annotations

import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.errors import DamagedError, UnreadableError, UsageError
from checkpointd_client.integrations.deepspeed.offline import safe_unpickle
from checkpointd_client.unpickling import torch_file
from checkpointd_client.unpickling.records import PickleFault, Record
from checkpointd_client.unpickling.torch_file import UntrustedTorchFile
from tests.unit.client.unpickling import zips


def test_files_of_torch_save_are_read(tmp_path: Path) -> None:
    tied = torch.arange(12.0)
    value = {
        "dtypes": [torch.zeros(3, dtype=dtype) for dtype in (torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool)],
        "views": [tied, tied[2:8].reshape(2, 3), torch.ones(1).expand(5), torch.tensor(3), torch.zeros(0, 4)],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "module": torch.nn.Linear(2, 2).state_dict(),
        "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
        "plain": [torch.Size([1, 2]), torch.bfloat16, {1, 2}, b"bytes", 1j, bytearray(b"x"), collections.Counter("aab")],
    }
    value["parameter"].ds_id = 3
    torch.save(value, tmp_path / "file.pt")
    found, expected = safe_unpickle.read(str(tmp_path / "file.pt")), torch.load(tmp_path / "file.pt", weights_only=False)
    torch.testing.assert_close(found.pop("views"), expected.pop("views"))
    for ours, theirs in zip(found.pop("dtypes"), expected.pop("dtypes"), strict=True):
        assert (ours.dtype, ours.shape, ours.view(torch.uint8).tolist()) == (
            theirs.dtype,
            theirs.shape,
            theirs.view(torch.uint8).tolist(),
        )
    assert type(found["parameter"]) is torch.nn.Parameter
    for key in ("parameter", "module"):
        torch.testing.assert_close(found.pop(key), expected.pop(key))
    assert found == expected


def test_conjugates_and_negatives(tmp_path: Path) -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    imaginary, odd = conjugate.clone().conj().imag, torch.zeros(2)
    value = {"conjugate": conjugate, "imaginary": imaginary, "parameter": torch.nn.Parameter(conjugate), "attribute": odd}
    odd.mine = 1  # type: ignore[attr-defined]
    torch.save(value, tmp_path / "file.pt")
    found = safe_unpickle.read(str(tmp_path / "file.pt"))
    assert (found["conjugate"].is_conj(), found["imaginary"].is_neg()) == (True, True)
    torch.testing.assert_close(found, value)


def test_metadata_of_a_tensor_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._utils, "get_tensor_metadata", lambda _: {"upside_down": True})
    torch.save({"a": torch.ones(2)}, tmp_path / "file.pt")
    with pytest.raises(DamagedError, match="the metadata upside_down, which is not known"):
        safe_unpickle.read(str(tmp_path / "file.pt"))


def test_tensors_that_unfold_to_more_than_the_file_holds(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "file.pt")
    with pytest.raises(UsageError, match="unfold to much more than it holds"):
        safe_unpickle.read(str(tmp_path / "file.pt"))
    one = torch.ones(1).expand(1 << 22)
    torch.save({str(number): one.view(2, -1) for number in range(8)}, tmp_path / "file.pt")
    with pytest.raises(UsageError, match="unfold to much more than it holds"):
        safe_unpickle.read(str(tmp_path / "file.pt"))


def program() -> bytes:
    """A program of TorchScript, which writes a file when torch loads it."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_program_of_torchscript_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own directory, and with another one that shows no `constants.pkl`: torch.load would run both."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("torch has the file")

    data = program()
    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr(torch.jit, "load", load)
    path = tmp_path / "mp_rank_00_model_states.pt"
    body, directory, count = zips.parts_of(data)
    other = directory.replace(b"constants.pkl", b"constants.pkX")
    for one in (data, body + directory + other + zips.end(count, len(directory), len(body))):
        path.write_bytes(one)
        with pytest.raises(DamagedError):
            safe_unpickle.read(str(path))


def test_the_file_that_was_checked_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file gets its name after it was opened."""
    path, other = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.ones(3)}, path)
    torch.save({"a": torch.zeros(3)}, other)
    entries_of = torch_file.entries_of

    def swapped(file: Any) -> Any:
        os.replace(other, path)
        return entries_of(file)

    monkeypatch.setattr(torch_file, "entries_of", swapped)
    assert safe_unpickle.read(str(path))["a"].tolist() == [1, 1, 1]


def test_writing_to_a_tensor_changes_no_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    safe_unpickle.read(str(tmp_path / "a.pt"))["a"].zero_()
    assert safe_unpickle.read(str(tmp_path / "a.pt"))["a"].tolist() == [1, 1, 1]


def test_tensors_that_shared_a_storage_share_one(tmp_path: Path) -> None:
    one = torch.arange(4.0)
    torch.save({"a": one, "b": one[1:3], "c": one}, tmp_path / "a.pt")
    found = safe_unpickle.read(str(tmp_path / "a.pt"))
    assert found["a"] is found["c"]
    assert found["b"].data_ptr() == found["a"].data_ptr() + 4


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data: bytes) -> Any:
    return UntrustedTorchFile(io.BytesIO(data), lambda: bytearray(data)).value()


def with_pickle(pickled: bytes, **others: bytes) -> bytes:
    """A file of torch.save with another pickle, and other entries."""
    content = zips.members(saved([torch.ones(2)]))
    return zips.zipped(content | {"archive/data.pkl": pickled} | {f"archive/{name}": data for name, data in others.items()})


def test_another_byte_order() -> None:
    with pytest.raises(PickleFault, match="another byte order"):
        read(with_pickle(b"\x80\x02N.", byteorder=b"big"))


def test_a_file_without_a_pickle() -> None:
    with pytest.raises(PickleFault, match=r"holds no data\.pkl"):
        read(zips.zipped({"archive/version": b"3"}))


def tensor_of(numel: int, offset: int, size: bytes, stride: bytes, key: bytes = b"0") -> bytes:
    """The pickle of a tensor in a storage."""
    number = [b"J" + n.to_bytes(4, "little", signed=True) for n in (numel, offset)]
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + key + b"X\3\0\0\0cpu" + number[0] + b"tQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number[1] + size + stride + b"\x89NtR."


WRONG_TENSORS = {
    "more elements than the storage": tensor_of(3, 0, b"K\x03\x85", b"K\x01\x85"),
    "a storage that is not there": tensor_of(2, 0, b"K\x02\x85", b"K\x01\x85", b"9"),
    "a negative length": tensor_of(-1, 0, b"K\x02\x85", b"K\x01\x85"),
    "behind the end": tensor_of(2, 1, b"K\x02\x85", b"K\x01\x85"),
    "before the beginning": tensor_of(2, -1, b"K\x02\x85", b"K\x01\x85"),
    "too far a stride": tensor_of(2, 0, b"K\x02\x85", b"K\x02\x85"),
    "fewer strides": tensor_of(2, 0, b"K\x02\x85", b")"),
    "sizes that are text": tensor_of(2, 0, b"X\1\0\0\0a", b"X\1\0\0\0a"),
    "many dimensions": tensor_of(2, 0, b"(" + b"K\1" * 65 + b"t", b"(" + b"K\1" * 65 + b"t"),
    "no bytes and a huge size": tensor_of(2, 0, b"K\0\x8a\x09" + b"\xff" * 8 + b"\0\x86", b"K\1K\1\x86"),
    "a key that leads out": tensor_of(2, 0, b"K\x02\x85", b"K\x01\x85", b"/"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_a_tensor_that_does_not_lie_in_its_storage(what: str) -> None:
    assert read(with_pickle(tensor_of(2, 0, b"K\x02\x85", b"K\x01\x85"))).tolist() == [1, 1]
    with pytest.raises(PickleFault):
        read(with_pickle(WRONG_TENSORS[what]))


def test_objects_stay_records_and_are_told(tmp_path: Path) -> None:
    found = read(saved({"path": Path("/x"), "error": ValueError("x")}))
    assert {type(value) for value in found.values()} == {Record}
    torch.save(Path("/x"), tmp_path / "a.pt")
    with pytest.raises(DamagedError, match="it holds a Record"):
        safe_unpickle.read(str(tmp_path / "a.pt"))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UnreadableError, match="not a regular file"):
        safe_unpickle.read(str(tmp_path / "pipe.pt"))
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises((DamagedError, UnreadableError)):
        safe_unpickle.read(str(tmp_path / "folder.pt"))


def test_a_pickle_that_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_file, "PICKLE_BYTES_MAX", 20)
    torch.save({"a": "x" * 99}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="more than 20"):
        safe_unpickle.read(str(tmp_path / "a.pt"))


def test_registered_extensions_are_not_looked_up() -> None:
    import copyreg

    copyreg.add_extension("os", "getcwd", 250)
    try:
        with pytest.raises(PickleFault, match="opcode 0x82"):
            read(with_pickle(b"\x80\x02\x82\xfa)R."))
    finally:
        copyreg.remove_extension("os", "getcwd", 250)
    assert pickle.loads(b"\x80\x02N.") is None
