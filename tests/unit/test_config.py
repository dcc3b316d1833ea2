"""What the environment says of a job."""

from __future__ import annotations

from typing import Any

import pytest

from checkpointd.config import check_job
from checkpointd.errors import UsageError

KNOWN = ("CHECKPOINTD_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
ARRAY = {"SLURM_JOB_ID": "905", "SLURM_ARRAY_JOB_ID": "900", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KNOWN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "run-1"}, "torchrun run-1"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "900"}, "slurm 900"),
        (ARRAY, "slurm 900_3"),
        ({**ARRAY, "TORCHELASTIC_RUN_ID": "900"}, "torchrun 900"),
        ({"CHECKPOINTD_JOB": "a uid", "TORCHELASTIC_RUN_ID": "run-1", "SLURM_JOB_ID": "900"}, "a uid"),
        ({"CHECKPOINTD_JOB": ""}, ""),
    ],
)
def test_the_jobs_name_comes_from_whoever_starts_it(
    environment: dict[str, str], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert check_job(None) == job
    assert check_job("mine") == "mine"


@pytest.mark.parametrize("job", ["", "a\nb", "x" * 201, 5, b"job"])
def test_what_cannot_be_a_name_is_refused(job: Any) -> None:
    with pytest.raises(UsageError, match="job is"):
        check_job(job)
