"""`.metadata` of a DCP directory is a pickle from somewhere: nothing in it runs, and nothing leads out of the directory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from checkpointd.errors import DamagedError, FormatError, NotFoundError, UnreadableError
from checkpointd.layout import tree
from checkpointd_client.integrations.conversion import metadata_file
from checkpointd_client.integrations.conversion.paths import leaves, name_of, state_tree
from checkpointd_client.integrations.dcp.importing import import_dcp
from checkpointd_client.integrations.dcp.tagged import step_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Hostile:
    def __init__(self, place: Path) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._place),)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    dcp.save({"w": torch.ones(4, 2), "x": 1}, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True)
    return tmp_path / "d"


def changed(directory: Path, change: Callable[[Metadata], object]) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_dcp_writes_is_read(directory: Path) -> None:
    found = metadata_file.read(directory)
    assert [(t.fqn, t.dtype, t.shape) for t in found.tensors] == [("w", "float32", (4, 2))]
    assert (list(found.objects), found.paths) == (["x"], {"w": ("w",), "x": ("x",)})


def test_code_is_refused_by_name_and_does_not_run(directory: Path) -> None:
    changed(directory, lambda m: setattr(m, "planner_data", Hostile(directory / "ran")))
    with pytest.raises(FormatError, match=r"posix\.mkdir, which is not part of DCP's metadata"):
        metadata_file.read(directory)
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.serialization", "load"),
    ],
)
def test_names_are_allowed_one_by_one(directory: Path, module: str, name: str) -> None:
    (directory / ".metadata").write_bytes(
        b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."
    )
    with pytest.raises(FormatError, match=f"names {module}.{name}"):
        metadata_file.read(directory)


def test_a_path_in_the_storage_meta_is_harmless(directory: Path) -> None:
    changed(directory, lambda m: setattr(m, "storage_meta", StorageMeta(checkpoint_id=Path("/somewhere"))))
    assert metadata_file.read(directory).tensors


def outside(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../other"


def negative(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = -1


def placed(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(changes)

    return change


def gap(metadata: Metadata) -> None:
    stored: Any = metadata.state_dict_metadata["w"]
    stored.size = torch.Size((5, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (outside, "lies in '../other'"),
        (negative, "at -1, which is impossible"),
        (placed(offset=1 << 63), "which is impossible"),
        (placed(length=float("inf")), "is not the metadata"),
        (placed(relative_path=".."), "lies in '..'"),
        (gap, "2 of 10 elements are written by no rank"),
        (lambda m: m.storage_data.clear(), "does not say where"),
        (lambda m: setattr(m, "state_dict_metadata", {"w": 5}), "is not the metadata"),
        (lambda m: setattr(m, "planner_data", {"w": ()}), "is not the metadata"),
        (lambda m: setattr(m, "planner_data", {"w": (1.5,)}), "is not the metadata"),
        (lambda m: setattr(m, "state_dict_metadata", None), "is not the metadata"),
    ],
)
def test_what_does_not_add_up_is_refused(directory: Path, change: Callable[[Metadata], object], words: str) -> None:
    changed(directory, change)
    with pytest.raises(DamagedError, match=words):
        metadata_file.read(directory)


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"\x80\x04N.", b"no pickle"])
def test_other_bytes_are_refused(directory: Path, data: bytes) -> None:
    (directory / ".metadata").write_bytes(data)
    with pytest.raises(FormatError, match=r"\.metadata"):
        metadata_file.read(directory)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: pipe(d / ".metadata"), "not a regular file"),
        (lambda d: pipe(d / "__0_0.distcp"), "not a regular file"),
        (lambda d: changed(d, placed(relative_path="a\0b")), "has no file a"),
        (lambda d: changed(d, placed(relative_path="\udcff\ud800")), "has no file"),
    ],
)
def test_what_is_no_file_is_neither_waited_for_nor_opened(
    directory: Path, tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(directory)
    with pytest.raises((UnreadableError, NotFoundError), match=words):
        import_dcp(directory, tmp_path / "root")


# --- names, paths and tags ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paths",
    [
        [("a", "b"), ("a", "c")],
        [("a.b", "c"), ("a", "x")],
        [("l", 0), ("l", 1, "x")],
        [("l", 1), ("l", 0)],
        [("l", 1)],
        [("l", 0, 0)],
        [("d", "0"), ("d", "1")],
        [("a",), ("a", "b")],
        [("m", "x", 0), ("m", "x", "y")],
    ],
)
def test_every_mapping_of_dcp_is_told_by_the_tree_and_what_goes_with_it(paths: list[tuple[str | int, ...]]) -> None:
    found: dict[str, Any] = {name_of(path): (path, 7 + i) for i, path in enumerate(paths)}
    root, untold = state_tree(found)
    told = {name_of(path): (untold.get(name_of(path), path), node) for path, node in leaves(root)}
    assert told == found


def test_what_dcp_does_not_look_into_is_a_leaf() -> None:
    inner = tree.Sequence("tuple", (tree.Tensor("t.0"),))
    root = tree.Dict(
        "dict", (("t", inner), ("l", tree.Sequence("list", (1, 2))), ("n", tree.Sequence("list", (tree.Tensor("n.0"),))))
    )
    assert [path for path, _ in leaves(root)] == [("t",), ("l",), ("n", 0)]


@pytest.mark.parametrize(("tag", "step"), [("global_step100", 100), ("a", 0), ("run2-step7-end", 7), ("9" * 30, 0)])
def test_the_step_in_a_tag(tag: str, step: int) -> None:
    assert step_of(tag) == step
