"""Checkpoints for programs without this library: torch.load and safetensors."""

from __future__ import annotations

import asyncio
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from checkpointd.errors import DamagedError, UsageError
from checkpointd_client import Checkpointer, consolidate, open_checkpoint
from checkpointd_client.capture.torch_files import placeholders_of
from checkpointd_client.export import torch_file as torch_files
from tests.builders import break_file, objects
from tests.unit.client.tied_model import TiedModel, same


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


@pytest.fixture
def root(tmp_path: Path, model: TiedModel) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embed(torch.arange(5))).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(4, {"model": model, "optimizer": optimizer, "other": {"w": torch.ones(3)}}).wait()
    return tmp_path / "root"


# --- torch's own file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_it_with_weights_only(root: Path, tmp_path: Path, model: TiedModel, mmap: bool) -> None:
    done = consolidate(root, tmp_path / "model.pt", only="model", format="torch")
    found = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
    assert same(found, model)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert found["window"].untyped_storage().data_ptr() == found["embed.weight"].untyped_storage().data_ptr()
    assert (done.format, done.files[0].name, done.tied) == ("torch", "model.pt", {"head.weight": "embed.weight"})


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_floats_are_converted_in_every_name(
    root: Path, tmp_path: Path, model: TiedModel, name: str, dtype: torch.dtype
) -> None:
    consolidate(root, tmp_path / "model.pt", only="model", format="torch", dtype=name)  # type: ignore[arg-type]  # by name
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), model, dtype)


def test_the_file_is_a_zip_file_whose_checksums_are_right(root: Path, tmp_path: Path) -> None:
    consolidate(root, tmp_path / "all.pt", format="torch")
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None
        assert len([name for name in archive.namelist() if "/data/" in name]) > 5


def test_the_file_is_what_torch_would_have_written(root: Path, tmp_path: Path) -> None:
    """The same members with the same bytes, as well aligned: whatever reads torch's files reads this one."""
    consolidate(root, tmp_path / "model.pt", only="model", format="torch")
    torch.save(torch.load(tmp_path / "model.pt", weights_only=True), tmp_path / "again.pt")

    def members(path: Path) -> list[tuple[str, int, int]]:
        with zipfile.ZipFile(path) as archive:
            infos = [(info.filename.partition("/")[2], info.file_size, info.CRC) for info in archive.infolist()]
        # torch gives each file an id; and pickle numbers names that it met before, which depends on who made them.
        return [info for info in infos if info[0] not in ("data.pkl", ".data/serialization_id")]

    assert members(tmp_path / "again.pt") == members(tmp_path / "model.pt")
    with (tmp_path / "model.pt").open("rb") as file:
        assert all(room.offset % 64 == 0 for room in placeholders_of(file))


PACKED = {f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)}
"""Dtypes that torch.save itself refuses."""


@pytest.mark.parametrize("dtype", sorted(torch_files.DTYPES.keys() - PACKED))
def test_every_dtype_that_can_be_saved_comes_back(tmp_path: Path, dtype: str) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    tensor = (bits % 2).view(torch.bool) if dtype == "bool" else bits.view(torch_files.DTYPES[dtype])
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": {"w": tensor}}).wait()
    consolidate(tmp_path / "root", tmp_path / "model.pt", only="model", format="torch")
    found = torch.load(tmp_path / "model.pt", weights_only=True)["w"]
    assert found.dtype == tensor.dtype
    assert found.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", sorted(torch_files.DTYPES.keys() & PACKED))
def test_a_dtype_that_torch_cannot_save_is_named(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(4, dtype=torch.uint8).view(torch_files.DTYPES[dtype])
    with pytest.raises(KeyError):
        torch.save({"w": tensor}, tmp_path / "by-torch.pt")
    (tmp_path / "by-torch.pt").unlink()
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": {"w": tensor}}).wait()
    with pytest.raises(UsageError, match=f"^w cannot be saved by this torch: dtype torch.{dtype} is not recognized"):
        consolidate(tmp_path / "root", tmp_path / "model.pt", only="model", format="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_name_that_no_ascii_has(root: Path, tmp_path: Path, model: TiedModel) -> None:
    consolidate(root, tmp_path / "modèle.pt", only="model", format="torch")
    assert same(torch.load(tmp_path / "modèle.pt", weights_only=True), model)


def test_torch_files_are_not_overwritten_and_damage_leaves_nothing(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    consolidate(root, out, only="model", format="torch")
    before = out.read_bytes()
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        consolidate(root, out, only="model", format="torch")
    chunks = next(path for path in objects(root, ".chunks") if path.stat().st_size)
    break_file(chunks, "flip")
    with pytest.raises(DamagedError):
        consolidate(root, out, format="torch", force=True)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "root"]


# --- safetensors -------------------------------------------------------------------------------------------------------


def test_safetensors_loads_a_model_with_tied_weights(tmp_path: Path) -> None:
    model, fresh = TiedModel(window=False), TiedModel(window=False)
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": model}).wait()
    consolidate(tmp_path / "root", tmp_path / "model.safetensors", only="model")
    missing, unexpected = load_model(fresh, tmp_path / "model.safetensors")
    assert (missing, unexpected) == (set(), [])
    assert same(fresh.state_dict(), model)
    assert fresh.head.weight is fresh.embed.weight
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.nightly
@pytest.mark.parametrize("ties", [True, False])
def test_transformers_loads_the_directory(tmp_path: Path, ties: bool) -> None:
    """Where it is installed: several files by their index, its own configuration beside them."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=ties,
    )
    model, out = transformers.LlamaForCausalLM(config), tmp_path / "exported"
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": model}).wait()
    consolidate(tmp_path / "root", out, only="model", max_shard_size="20KB")
    config.save_pretrained(out)
    assert (out / "model.safetensors.index.json").exists()
    loaded, told = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    assert same(loaded.state_dict(), model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == ties


def test_it_works_where_a_loop_runs_already(root: Path, tmp_path: Path, model: TiedModel) -> None:
    """As in a notebook."""

    async def cell() -> dict[str, torch.Tensor]:
        consolidate(root, tmp_path / "model.pt", only="model", format="torch")
        with open_checkpoint(root) as opened:
            return dict(opened.tensors("model"))

    assert same(asyncio.run(cell()), model)
    assert same(torch.load(tmp_path / "model.pt", weights_only=True), model)


class Turned(nn.Module):
    """It turns the rows that were stored by a version before its own."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def _load_from_state_dict(self, found: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            found[f"{prefix}rows"] = found[f"{prefix}rows"].flip(0)
        super()._load_from_state_dict(found, prefix, metadata, *rest)


def test_the_versions_of_a_modules_parts_go_with_its_tensors(tmp_path: Path) -> None:
    model, mine = nn.Sequential(torch.nn.ReLU(), Turned()), nn.Sequential(torch.nn.ReLU(), Turned())
    with torch.no_grad():
        model[1].rows.add_(10)  # type: ignore[operator]  # a tensor
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": nn.ModuleDict({"inner": model})}).wait()
    consolidate(tmp_path / "root", tmp_path / "m.pt", only="model.inner", format="torch")
    with open_checkpoint(tmp_path / "root") as opened:
        for found in (torch.load(tmp_path / "m.pt", weights_only=True), opened.tensors("model.inner")):
            mine.load_state_dict(found)
            assert torch.equal(mine[1].rows, model[1].rows)
        whole = nn.ModuleDict({"model": nn.ModuleDict({"inner": mine})})
        whole.load_state_dict(opened.tensors())
        assert torch.equal(mine[1].rows, model[1].rows)
    consolidate(tmp_path / "root", tmp_path / "m.safetensors", only="model.inner")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["_metadata"])["1"] == {"version": 2}
