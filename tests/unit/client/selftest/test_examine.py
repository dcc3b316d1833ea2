"""The selftest on a machine without an accelerator, and how it words what it saw. On a device: tests/accelerator, tests/gpu."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.doctor.finding import Finding
from checkpointd.errors import UsageError
from checkpointd_client.selftest import examine
from checkpointd_client.selftest.results import each_made, finding, ok_if_provoked, ok_if_same

NO_ACCELERATOR = f"there is no accelerator to test: torch {torch.__version__} sees none on this machine"


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)


def test_without_an_accelerator_there_is_nothing_to_test(nothing_there: None, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no accelerator to test"):
        examine.examine(directory=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_python_m_says_so_and_ends_with_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "checkpointd_client.selftest", "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"]["message"].startswith(NO_ACCELERATOR)


def test_an_error_ends_its_checks_alone() -> None:
    def checks() -> Iterator[Finding]:
        yield finding("shapes", "ok", "the same")
        raise RuntimeError("the device was lost\nCompile with TORCH_USE_CUDA_DSA")

    good, bad = each_made("content", checks)
    assert (good.check, good.level) == ("shapes", "ok")
    assert (bad.check, bad.level, bad.seen) == ("content", "fail", "RuntimeError: the device was lost")
    assert "report it in an issue" in bad.fix


def test_a_mistake_that_did_not_show_is_no_proof() -> None:
    assert ok_if_provoked("clone", True, "a buffer", "shows").level == "ok"
    unproved = ok_if_provoked("clone", False, "a buffer that is not cloned", "shows")
    assert (unproved.level, unproved.seen) == (
        "note",
        "could not be provoked here, so this check proves nothing: a buffer that is not cloned",
    )


def test_tensors_with_other_bytes_are_named() -> None:
    assert ok_if_same("dtypes", [], "20 dtypes").seen == "the same bytes after a load: 20 dtypes"
    wrong = ok_if_same("dtypes", ["int8", "bool"], "20 dtypes")
    assert (wrong.level, wrong.seen) == ("fail", "other bytes after a load: int8, bool")
