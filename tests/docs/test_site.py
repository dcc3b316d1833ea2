"""The documentation site builds without a warning: every link leads somewhere, and every docstring is well formed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import checkpointd_client
from tests.docs.blocks import REPOSITORY

needs_sphinx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("sphinx", "myst_parser", "pydata_sphinx_theme", "torch")),
    reason='needs the extra "docs", and torch for the reference',
)


@pytest.mark.nightly
@needs_sphinx
@pytest.mark.timeout(300)
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-c",
        "docs",
        "-d",
        tmp_path / "cache",
        ".",
        tmp_path / "site",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": "client"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "docs" / "reference" / "client.html").read_text()
    names = [name for name in checkpointd_client.__all__ if name != "__version__"]
    assert [name for name in names if f'id="checkpointd_client.{name}"' not in reference] == []
    pages = {path.relative_to(REPOSITORY).with_suffix(".html") for path in (REPOSITORY / "docs").rglob("*.md")}
    assert [page for page in sorted(pages) if not (tmp_path / "site" / page).is_file()] == []


def test_no_page_has_the_marks_of_an_unfinished_merge() -> None:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("examples/**/*.md")]
    assert len(pages) > 40
    marks = ("<<<<<<< ", ">>>>>>> ")
    assert [page.name for page in pages if any(line.startswith(marks) for line in page.read_text().splitlines())] == []
