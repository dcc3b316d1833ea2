"""Any one file of `log/` is gone or damaged, at a root where starts have begun since: no checkpoint is lost, and a start loads
the newest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointd.layout.keys import LOG
from checkpointd_client import list_checkpoints
from tests.copies.jobs import Run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three starts of two saves each. The last one begins after all of their commits."""
    job = Run(tmp_path_factory.mktemp("job") / "root")
    for step in (1, 3, 5):
        job.start((step, step), (step + 1, step + 1))
    job.start()
    return job


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x20
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [Path.unlink, pytest.param(flipped, marks=pytest.mark.nightly)])
def test_no_file_of_the_log_takes_a_checkpoint_along(job: Run, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    names = sorted(path.name for path in (job.root / LOG).iterdir())
    assert len(names) > 12
    for name in names:
        root = Path(shutil.copytree(job.root, tmp_path / name))
        harm(root / LOG / name)
        found = job.at(root).start()
        assert found.loaded is not None, name
        assert (found.loaded.step, found.loaded.fell_back_from) == (6, ()), name
        assert {one.step for one in list_checkpoints(root)} == {1, 2, 3, 4, 5, 6}, name
        assert job.at(root).start().value == 6, name
        shutil.rmtree(root)
