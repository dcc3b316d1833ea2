from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from tests.unit.cli.conftest import Cli

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "step12"
    dcp.save({"model": {"w": torch.ones(5)}, "epoch": 4}, storage_writer=FileSystemWriter(place), no_dist=True)
    return place


def test_a_directory_of_dcp_comes_in_and_leaves(cli: Cli, source: Path, tmp_path: Path) -> None:
    root, out = tmp_path / "made" / "root", tmp_path / "out"
    answer = cli("import", "--from", "dcp", source, root)
    assert answer.code == 0
    assert answer.lines[0] == f"{source} -> step12"
    assert {"step: 12", "tensors: 1", "values: 1", "size: 20B", "written as: 1 part"} <= set(answer.lines)
    found = cli("export", root, "step12", out, "--format", "dcp", "--json").json
    assert (found["tag"], found["step"], found["format"], found["bytes"], found["left_out"]) == ("step12", 12, "dcp", 20, [])
    target: dict[str, Any] = {"model": {"w": torch.zeros(5)}, "epoch": 0}
    dcp.load(target, storage_reader=FileSystemReader(out), no_dist=True)
    assert target["model"]["w"].equal(torch.ones(5))
    assert target["epoch"] == 4
    assert cli("import", out, tmp_path / "again", "--json").json["step"] == 12


def test_the_tag_the_step_and_the_pointer_are_the_users(cli: Cli, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert cli("import", source, root, "--tag", "first").code == 0
    found = cli("import", source, root, "--tag", "other", "--step", "5", "--no-latest", "--json").json
    assert (found["tag"], found["step"]) == ("other", 5)
    assert (root / "latest").read_text() == "first\n"
    assert cli("import", source, root, "--tag", "other").code == 2
    assert cli("import", source, root, "--tag", "other", "--force").code == 0


@pytest.mark.parametrize("step", ["-1", str(10**22)])
def test_a_step_that_cannot_be_is_refused(cli: Cli, source: Path, tmp_path: Path, step: str) -> None:
    answer = cli("import", source, tmp_path / "root", "--step", step)
    assert answer.code == 2
    assert f"step is {step}" in answer.err
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("root", ["step12", "step12/root", "./step12/../step12"])
def test_an_import_writes_nothing_into_its_source(cli: Cli, source: Path, tmp_path: Path, root: str) -> None:
    before = sorted(source.rglob("*"))
    answer = cli("import", source, f"{tmp_path}/{root}")
    assert answer.code == 2
    assert f"is in {source}, which an import only reads: give a root outside" in answer.err
    assert sorted(source.rglob("*")) == before


def test_what_is_in_the_way_stays(cli: Cli, source: Path, tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    cli("import", source, root)
    assert cli("export", root, out).code == 0
    assert cli("export", root, out).code == 2
    assert cli("export", root, out, "--force").code == 0
    (out / "mine").touch()
    assert cli("export", root, out, "--force").code == 2


def test_a_tag_to_export_is_understood_by_its_path_and_by_its_number(cli: Cli, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    cli("import", source, root)
    assert cli("export", root / "step12", tmp_path / "one", "--json").json["tag"] == "step12"
    assert cli("export", root, "12", tmp_path / "two", "--json").json["tag"] == "step12"
    answer = cli("export", tmp_path, "step12", tmp_path / "three")
    assert f"did you mean `checkpointd export {root} step12 {tmp_path}/three`?" in answer.err


@pytest.mark.parametrize(("arguments", "code"), [(("import",), 2), (("export",), 2), (("import", "/nowhere", "/nowhere"), 4)])
def test_calls_that_cannot_work(cli: Cli, arguments: tuple[str, ...], code: int) -> None:
    assert cli(*arguments).code == code


def test_without_torch_the_words_say_what_to_install(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(_: str) -> Any:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr("checkpointd.cli.formats.import_module", without)
    answer = cli("export", tmp_path, "tag", tmp_path / "out")
    assert answer.code == 2
    assert "pip install '.[torch]' in a clone" in answer.err
