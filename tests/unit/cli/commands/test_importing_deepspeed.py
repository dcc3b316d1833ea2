from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.unit.cli.conftest import Cli
from tests.unit.client.integrations.deepspeed.offline.handmade_zero import make


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make(tmp_path / "src" / "step5", 2, 2, mine={"epoch": 3}, odd=Path("x"))
    return tmp_path / "src"


def test_a_checkpoint_comes_in_without_what_cannot_be_stored(cli: Cli, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "made" / "root"
    refused = cli("import", "--from", "deepspeed", source, root)
    assert refused.code == 2
    assert "client_state.odd" in refused.err
    answer = cli("import", "--from", "deepspeed", source, root, "--leave-out")
    assert answer.code == 0
    assert answer.lines[0] == f"{source / 'step5'} -> step5"
    assert "step: 5" in answer.lines
    found = cli("import", "--from", "deepspeed", source / "step5", tmp_path / "other", "--leave-out", "--json").json
    assert (found["tag"], found["stage"], found["ranks"], len(found["left_out"])) == ("step5", 2, 2, 1)


def test_leaving_out_is_for_deepspeed(cli: Cli, source: Path, tmp_path: Path) -> None:
    assert cli("import", source, tmp_path / "root", "--leave-out").code == 2


def test_weights_are_consolidated_from_its_files(cli: Cli, source: Path, tmp_path: Path) -> None:
    found = cli("consolidate", source, tmp_path / "out", "--json").json
    assert (found["tag"], found["step"], found["format"], found["tied"]) == (
        "step5",
        5,
        "safetensors",
        {"tied.weight": "a.weight"},
    )
    assert load_file(tmp_path / "out" / "model.safetensors")["a.weight"].shape == (7, 3)
    assert cli("consolidate", source, "step5", tmp_path / "model.pt").code == 0
    assert cli("consolidate", source, "step5", tmp_path / "x", "--only", "optimizer").code == 2
    assert cli("consolidate", source, "step5", source / "step5" / "x").code == 2


def test_a_tag_of_its_files_is_no_place_to_write_to(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli("consolidate", source, "step5")
    assert answer.code == 2
    assert f"step5 is a checkpoint of {source}; where to?" in answer.err
    assert not Path("step5").exists()
    assert cli("consolidate", source, "./step5").code == 0


@pytest.mark.parametrize("root", ["src", "src/step5", "src/step5/root"])
def test_an_import_writes_nothing_into_its_source(cli: Cli, source: Path, tmp_path: Path, root: str) -> None:
    before = sorted(source.rglob("*"))
    answer = cli("import", "--from", "deepspeed", source, tmp_path / root, "--leave-out")
    assert answer.code == 2
    assert "which an import only reads: give a root outside" in answer.err
    assert sorted(source.rglob("*")) == before


def test_the_save_dir_of_a_job_stands_for_the_root_in_it(cli: Cli, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / ".checkpointd") as ckpt:
        core_of(ckpt).save_files(4, {"a_states.pt": {"x": torch.ones(3)}}).wait(60)
    listed = cli("list", tmp_path, "--json").json
    assert (listed["root"], [row["tag"] for row in listed["rows"]]) == (str(tmp_path / ".checkpointd"), ["global_step4"])
    for call in (
        ("verify", tmp_path),
        ("explain", tmp_path, "global_step4"),
        ("gc", tmp_path),
        ("recover", tmp_path, "--dry-run"),
    ):
        assert cli(*call).code == 0, call
    assert not (tmp_path / ".checkpointd" / "starts").exists(), "the directory has become a root of its own"
    with Checkpointer(tmp_path / ".checkpointd") as ckpt:
        assert [found.tag for found in ckpt.list()] == ["global_step4"]
