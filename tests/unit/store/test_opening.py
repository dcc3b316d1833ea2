"""From a root as the user gives it to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.errors import UsageError
from checkpointd.store import open_store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix import PosixStore


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("/mnt/ckpts", "/mnt/ckpts"),
        ("/mnt/ckpts/../run/", "/mnt/run"),
        ("file:///mnt/a%20b", "/mnt/a b"),
        ("file://localhost/mnt", "/mnt"),
        ("/odd/http:/x", "/odd/http:/x"),
    ],
)
def test_paths(root: str, path: str) -> None:
    store = open_store(root)
    assert isinstance(store, PosixStore)
    assert store.url == path
    assert isinstance(open_store(store.url), PosixStore)


def test_relative_paths_are_fixed_when_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(Path("run1"))
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "run1")


def test_memory() -> None:
    store = open_store("memory://node0")
    assert isinstance(store, MemoryStore)
    assert store.url == "memory://node0"


@pytest.mark.parametrize("root", ["s3://bucket/run1", "gs://bucket", "http://host/x", "file://host/mnt", "file:///mnt?x=1"])
def test_other_urls_are_refused_by_name(root: str) -> None:
    with pytest.raises(UsageError, match=root.split("?")[0]):
        open_store(root)


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_what_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(UsageError, match="not a root"):
        open_store(root)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_store(tmp_path / "run1")
    assert list(tmp_path.iterdir()) == []
