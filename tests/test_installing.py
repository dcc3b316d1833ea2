"""checkpointd is on no package index until its first release, and whoever registers its name there owns every machine that
installs it by name. So no page, message, example or deploy file says so: they install from a clone or from a wheel file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointd.commands import install

pytestmark = pytest.mark.xdist_group("sources")

ROOT = Path(__file__).resolve().parents[1]
NAME = "checkpoint" + "d"
_TOOL = r"\b(?:pip3?|uv|uvx|pipx|poetry|pdm|conda|mamba)\b[ \t][^\n`|;&]*?"
_VERB = r"(?:\b(?:install|add|run|download|wheel)|--from|--with|--spec)\b"
_WORDS = r"""(?:[ \t]+(?!in\b|of\b|from\b|with\b)[^\s`|;&]+)*?[ \t]+["'`]*"""
BY_NAME = (
    # pip install -U NAME; uv add NAME; pipx run NAME
    re.compile(rf"""{_TOOL}{_VERB}{_WORDS}{NAME}(?=["'`\s)\[]|[=<>~!]=|$)""", re.MULTILINE),
    re.compile(rf"\buvx {NAME}\b"),
    # NAME[extra], wherever it stands
    re.compile(rf"""(?<![\w./"'])["'`]?{NAME}\[[a-z]"""),
    re.compile(rf"""["'`]{NAME}\[[a-z][a-z0-9,_-]*\]"""),
    # a line of requirements
    re.compile(rf"""^[\s"'-]*{NAME}\s*(?:[=~<>!]=|===)""", re.MULTILINE),
)
NOT_OURS = {".git", ".venv", ".venv-integrations", "__pycache__", "dist", "build", "site", "runs", "CHANGELOG.md"}
"""Directories that are not the repository's, and the history of changes, which says what was."""


def by_name(text: str) -> Iterator[str]:
    """The places that install the project by its name."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for pattern in BY_NAME:
        yield from (match[0] for match in pattern.finditer(joined))


def texts(folder: Path = ROOT) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()):
        if path.name in NOT_OURS or path.is_symlink() or path.suffix in {".png", ".gz", ".pyc", ".whl"}:
            continue
        if path.is_dir():
            if not path.name.endswith("_cache"):
                yield from texts(path)
        elif path != Path(__file__).resolve():
            try:
                yield path.relative_to(ROOT).as_posix(), path.read_text()
            except UnicodeDecodeError:
                continue


def test_nothing_installs_the_project_by_its_name() -> None:
    found = dict(texts())
    assert {"README.md", "deploy/README.md", "deploy/container/Containerfile", "examples/README.md"} <= found.keys()
    wrong = [f"{path}: {place}" for path, text in found.items() for place in by_name(text)]
    assert not wrong, "\n".join([*wrong, "instead: from a clone, as pip install '.[torch]', or from a wheel file"])


@pytest.mark.parametrize(
    "text",
    [
        f"pip install {NAME}",
        f"pip install '{NAME}[torch]'",
        f'python -m pip install -U "{NAME}[serve,s3]"',
        f"RUN pip install --no-cache-dir numpy \\\n    {NAME}",
        f"pip install torch {NAME}==0.1",
        f"uv add {NAME}",
        f"uv pip install {NAME}",
        f"uvx {NAME} list",
        f"pipx install {NAME}",
        f"uv run --with {NAME} train.py",
        f"- `{NAME}[serve]` brings aiohttp",
        f"needs it: install {NAME}[serve]",
        f"torch==2.10\n{NAME}>=0.1\n",
    ],
)
def test_installing_by_name_is_found(text: str) -> None:
    assert list(by_name(text))


@pytest.mark.parametrize(
    "text",
    [
        install("torch"),
        "pip install '.[torch]'",
        f"pip install dist/{NAME}-0.1.0-py3-none-any.whl",
        f'pip install "git+https://example.com/{NAME}@main"',
        f"/opt/{NAME}/bin/pip install '..[serve]'",
        f"{NAME} serve --root DIR",
        f"install -m 0644 systemd/{NAME}@.service /etc/systemd/system/",
        f"entries = {NAME}_entries[a]",
    ],
)
def test_other_ways_are_not(text: str) -> None:
    assert not list(by_name(text))
