"""Jobs that several tests share, since starting a job takes seconds and most tests do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.jobs import Job


@pytest.fixture(scope="session")
def spare() -> Iterator[list[Job]]:
    """The job that the next test can have, if there is one."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.close()


@pytest.fixture
def pair(spare: list[Job], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks, with no Checkpointer yet. A test may leave them in any state, dead included."""
    job = spare.pop() if spare else Job(folder=tmp_path_factory.mktemp("pair"))
    try:
        yield job
    except BaseException:
        job.close()
        raise
    if job.rest():
        spare.append(job)
    else:
        job.close()
