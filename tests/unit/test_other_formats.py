"""Checkpoints of other programs are recognised, and the command or call that reads them is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointd.other_formats import of_others, recognised

LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)


def archive(**entries: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, data in entries.items():
            file.writestr(name if "/" in name else name.replace("__", "/"), data)
    return made.getvalue()


def torch_zip(pickled: bytes = b"\x80\x02}.", **more: bytes) -> bytes:
    return archive(**{"archive__data.pkl": pickled, **more})


def tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        file.addfile(tarfile.TarInfo("inside"))
    return made.getvalue()


SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
INDEX = json.dumps({"weight_map": {}}).encode()
ROOTS = {"log/root": b"", "step3/00000001-0/index-00000": b""}


@pytest.mark.parametrize(
    ("files", "given", "words"),
    [
        ({"x.pt": torch_zip()}, "x.pt", "file of torch.save: load it as before, with torch.load"),
        ({"x.pt": LEGACY + b"..."}, "x.pt", "before torch 1.6"),
        ({"x.ckpt": torch_zip(b"\x80\x02}X\x19\x00\x00\x00pytorch-lightning_versionq")}, "x.ckpt", "Lightning: .*ckpt_path="),
        ({"x.pt": torch_zip(**{"archive/code/__torch__.py": b""})}, "x.pt", "TorchScript"),
        ({"x.npz": archive(**{"a.npy": b"\x93NUMPY"})}, "x.npz", r"numpy\.load"),
        ({"x.npy": b"\x93NUMPY\x01"}, "x.npy", r"numpy\.load"),
        ({"x.zip": archive(a=b"")}, "x.zip", "zip archive: unpack it"),
        ({"x.pkl": pickle.dumps({"a": 1})}, "x.pkl", "pickle, which can run code"),
        ({"x.safetensors": SAFETENSORS}, "x.safetensors", r"safetensors\.torch\.load_file"),
        ({"x.gguf": b"GGUF\x03\x00"}, "x.gguf", "gguf_file="),
        ({"x.h5": b"\x89HDF\r\n\x1a\n"}, "x.h5", "Keras or h5py"),
        ({"x.tar": tar()}, "x.tar", "tar archive: unpack it"),
        ({"x.tar.gz": b"\x1f\x8b\x08"}, "x.tar.gz", "compressed by gzip: unpack it"),
        ({"x.zst": b"\x28\xb5\x2f\xfd"}, "x.zst", "compressed by zstd"),
        ({"x.safetensors": b"version https://git-lfs.github.com/spec/v1\n"}, "x.safetensors", "git lfs pull"),
        ({"s3/.metadata": b"", "s3/__0_0.distcp": b""}, "s3", r"`checkpointd import --from dcp \S+/s3 ROOT` imports it"),
        ({"s3/.metadata": b"", "s3/__0_0.distcp": b""}, "s3/__0_0.distcp", r"--from dcp \S+/s3 ROOT`"),
        (
            {"run/s3/.metadata": b"", "run/other/x": b""},
            "run",
            r"as in `\S+ import --from dcp \S+/run/s3 R",
        ),
        ({"s3/__0_0.distcp": b""}, "s3", "not completed"),
        ({"s3/.metadata": b"", "s3/common.pt": b""}, "s3", "Megatron"),
        ({"g7/mp_rank_00_model_states.pt": b""}, "g7", r"`checkpointd import --from deepspeed \S+/g7 ROOT` imports it"),
        ({"run/latest": b"g7", "run/g7/mp_rank_00_model_states.pt": b""}, "run", r"--from deepspeed \S+/run ROOT` imports"),
        ({"run/g7/mp_rank_00_model_states.pt": b""}, "run", r"--from deepspeed \S+/run ROOT --tag g7`"),
        ({"run/g7/mp_rank_00_model_states.pt": b""}, "run/g7/mp_rank_00_model_states.pt", r"--from deepspeed \S+/g7 ROOT`"),
        ({"hf/model.safetensors.index.json": INDEX}, "hf", r"from_pretrained\('\S+/hf'\)"),
        ({"hf/model.safetensors.index.json": INDEX}, "hf/model.safetensors.index.json", r"from_pretrained\('\S+/hf'\)"),
        ({"hf/config.json": b"{}", "hf/model.safetensors": SAFETENSORS}, "hf", r"from_pretrained\('\S+/hf'\)"),
        ({"hf/adapter_config.json": b"{}"}, "hf", r"PeftModel\.from_pretrained"),
        ({"c-5/trainer_state.json": b"{}"}, "c-5", r"trainer\.train\(resume_from_checkpoint="),
        ({"o/_CHECKPOINT_METADATA": b"{}"}, "o", r"orbax\.checkpoint"),
        ({"o/default/manifest.ocdbt": b""}, "o", r"orbax\.checkpoint"),
        ({"z/.zgroup": b"{}"}, "z", "checkpoint of zarr"),
        ({"t/.snapshot_metadata": b"{}"}, "t", "torchsnapshot"),
        ({"t/x.data-00000-of-00001": b"", "t/checkpoint": b""}, "t", "TensorFlow"),
        ({"w/a.pt": torch_zip(), "w/notes.txt": b""}, "w", r"holds a\.pt, which is a file of torch\.save"),
        (ROOTS, ".", r"root of checkpointd, and needs no import: `checkpointd list"),
        (ROOTS, "step3", r"the tag step3 of the root \S+, and needs no import: `checkpointd inspect"),
    ],
)
def test_a_checkpoint_of_another_program_is_recognised(tmp_path: Path, files: dict[str, bytes], given: str, words: str) -> None:
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = recognised(tmp_path / given)
    assert found is not None
    assert re.search(words, found), found


@pytest.mark.parametrize(
    "make",
    [
        lambda _: None,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PK\x03\x04 cut off"),
        lambda path: path.write_bytes(b"\xff" * 8 + b"{"),
        lambda path: path.write_text("words"),
    ],
)
def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "x")
    assert recognised(tmp_path / "x") is None


@pytest.mark.parametrize("name", ["a.safetensors", "pytorch_model.bin", "x.gguf", "g7_model_states.pt", "latest"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert recognised(tmp_path / name) is None or name == "g7_model_states.pt"
    recognised(tmp_path)


@pytest.mark.parametrize("at", [8, 6])
def test_an_archive_that_cannot_be_unpacked_is_named_all_the_same(tmp_path: Path, at: int) -> None:
    """Its entries are encrypted, or compressed in a way that nobody knows."""
    data = bytearray(torch_zip())
    for place in (data.find(b"PK\x03\x04") + at, data.find(b"PK\x01\x02") + at + 2):
        data[place] = 0x61
    (tmp_path / "x.pt").write_bytes(data)
    assert "is a file of torch.save" in str(recognised(tmp_path / "x.pt"))


def test_a_root_of_ours_is_not_of_others(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/root").touch()
    (tmp_path / "x.pt").write_bytes(torch_zip())
    (tmp_path / "step3/00000001-0").mkdir(parents=True)
    assert of_others(tmp_path) is None
    assert of_others(tmp_path / "step3") is None
