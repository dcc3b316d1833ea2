from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpointd.store.base import Store
from tests.builders import Arrays, save_checkpoint
from tests.unit.cli.conftest import Cli, With


def tensors(rank: int) -> Arrays:
    return {"model.w": np.arange(6, dtype=np.float32).reshape(2, 3), "rng.state": np.full(4, rank, np.uint8)}


async def two(store: Store) -> None:
    await save_checkpoint(store, tag="global_step1", tensors=lambda _: {"model.w": np.zeros((2, 3), np.float32)})
    await save_checkpoint(store, tag="global_step2", tensors=tensors)


WEIGHT = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def test_latest_leaves_as_safetensors_and_the_page_says_what(root: Path, at: With, cli: Cli, tmp_path: Path) -> None:
    at(two)
    answer = cli("consolidate", root, tmp_path / "out", "--only", "model")
    assert answer.code == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], WEIGHT)
    assert answer.lines[0] == f"global_step2 -> {tmp_path}/out"
    assert "size: 24B" in answer.lines
    assert any(line.startswith("model.safetensors ") for line in answer.lines)


def test_a_tag_and_json(root: Path, at: With, cli: Cli, tmp_path: Path) -> None:
    at(two)
    found = cli("consolidate", root, "global_step1", tmp_path / "out", "--only", "model", "--dtype", "bf16", "--json").json
    assert (found["tag"], found["step"], found["bytes"], found["tensors"]) == ("global_step1", 1, 12, 1)
    assert (found["format"], found["out"], found["tied"]) == ("safetensors", str(tmp_path / "out"), {})
    assert [file["name"] for file in found["files"]] == ["model.safetensors"]
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("spelling", ["{root} 1", "{root}/global_step1", "{root}/.checkpointd global_step1/"])
def test_spellings_of_a_tag(root: Path, at: With, cli: Cli, tmp_path: Path, spelling: str) -> None:
    at(two)
    places = spelling.format(root=root).split()
    assert cli("consolidate", *places, tmp_path / "out", "--json").json["tag"] == "global_step1"
    assert cli("consolidate", *places, tmp_path / "out", "--only", "model", "--force").code == 0


def test_what_is_no_root_names_the_one_below_it(root: Path, at: With, cli: Cli, tmp_path: Path) -> None:
    at(two)
    answer = cli("consolidate", tmp_path, "global_step1", tmp_path / "out")
    assert answer.code == 4
    assert f"did you mean `checkpointd consolidate {root} global_step1 {tmp_path}/out`?" in answer.err


def test_the_root_of_the_environment(root: Path, at: With, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(two)
    monkeypatch.setenv("CHECKPOINTD_ROOT", str(root))
    assert cli("consolidate", tmp_path / "one", "--only", "model").code == 0
    assert cli("consolidate", "global_step1", tmp_path / "two", "--only", "model").code == 0
    assert not torch.equal(*(load_file(tmp_path / name / "model.safetensors")["w"] for name in ("one", "two")))


@pytest.mark.parametrize("arguments", [("model.pt",), ("model.any", "--format", "torch")])
def test_a_torch_file(root: Path, at: With, cli: Cli, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    at(two)
    answer = cli("consolidate", root, tmp_path / arguments[0], *arguments[1:], "--only", "model")
    assert answer.code == 0
    assert torch.equal(torch.load(tmp_path / arguments[0], weights_only=True)["w"], WEIGHT)


@pytest.mark.parametrize(("out", "kind"), [("w.safetensors", "torch"), ("w.pt", "safetensors"), ("w.bin", "safetensors")])
def test_a_name_that_promises_another_format_is_refused(
    root: Path, at: With, cli: Cli, tmp_path: Path, out: str, kind: str
) -> None:
    at(two)
    answer = cli("consolidate", root, tmp_path / out, "--format", kind, "--only", "model")
    assert answer.code == 2
    assert f"--format {kind} does not fit {tmp_path}/{out}" in answer.err
    assert not (tmp_path / out).exists()


@pytest.mark.parametrize("command", ["consolidate", "export"])
@pytest.mark.parametrize("out", ["global_step1", "global_step1/", "1", "latest"])
def test_a_checkpoint_is_no_place_to_write_to(
    root: Path, at: With, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, out: str
) -> None:
    at(two)
    monkeypatch.chdir(tmp_path)
    answer = cli(command, root, out)
    assert answer.code == 2
    assert f"{out.rstrip('/')} is a checkpoint of {root}; where to?" in answer.err
    monkeypatch.setenv("CHECKPOINTD_ROOT", str(root))
    assert cli(command, out).code == 2
    assert not Path(out).exists()
    if command == "consolidate":
        assert cli(command, root, f"./{out}", "--only", "model").code == 0
        assert cli(command, root, "global_step2", "global_step2", "--only", "model").code == 0
        assert Path(out).is_dir()


def test_shards(root: Path, at: With, cli: Cli, tmp_path: Path) -> None:
    at(two)
    assert cli("consolidate", root, tmp_path / "out", "--rank", "1", "--max-shard-size", "20B").code == 0
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert load_file(tmp_path / "out" / names[1])["rng.state"].tolist() == [1] * 4


def test_without_torch_the_words_say_what_to_install(
    root: Path, at: With, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(two)
    imported = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
        return imported(name, *arguments)

    monkeypatch.delitem(sys.modules, "checkpointd_client.export.torch_file", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    answer = cli("consolidate", root, tmp_path / "model.pt")
    assert answer.code == 2
    assert answer.err.startswith("error: --format torch needs torch, which cannot be imported (No module named 'torch')")
    assert "pip install '.[torch]' in a clone" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "where to? Give the root and the place to write to, as in `checkpointd consolidate /mnt/ckpts/run1 "),
        (("{root}",), 2, "where to? Give the root and the place to write to, as in `checkpointd consolidate {root} "),
        (("{root}", "{out}"), 2, "rng.state is not the same on ranks 0 and 1"),
        (("{root}", "{out}", "--only", "x"), 4, "its parts are: model, rng"),
        (("{root}", "nothing", "{out}"), 4, "there is no tag 'nothing'"),
        (("{root}", "{root}/out"), 2, "lies inside the root"),
        (("{root}", "{out}", "--max-shard-size", "big"), 2, "--max-shard-size is 'big'"),
        (("{root}", "{out}", "--memory", "1KB"), 2, "memory is 1000 bytes"),
        (("{root}", "{out}", "--dtype", "fp16"), 2, "'fp16' is not one of"),
    ],
)
def test_what_cannot_work_is_said(
    root: Path, at: With, cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    at(two)
    answer = cli("consolidate", *(text.format(root=root, out=tmp_path / "out") for text in arguments))
    assert (answer.code, answer.out) == (code, "")
    assert words.format(root=root) in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run1"]
