"""From a root as the user gives it to a store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointd.cli.commands.serve import _settings
from checkpointd.config import ExportConfig, ServeConfig, ServedMirror, SpoolConfig
from checkpointd.errors import NotFoundError, StoreError, UsageError
from checkpointd.export.output import Output
from checkpointd.layout.keys import SERVICE
from checkpointd.store import open_store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.showing import plain_files_of
from checkpointd_client import Checkpointer, list_checkpoints, open_checkpoint, rollback


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


@pytest.mark.parametrize("root", ["http://host/x", "hf://bucket/x", "file://host/mnt", "file:///mnt?x=1"])
def test_other_urls_are_refused_by_name(root: str) -> None:
    with pytest.raises(UsageError, match=root.split("?")[0]):
        open_store(root)


@pytest.mark.parametrize(
    "root", ["https://a.example/c?sv=1&sig=HUSH", "minio://key:HUSH@host/x", "minio://key:HU/SH@host/x", "minio://[HUSH"]
)
def test_the_secret_in_another_url_is_not_repeated(root: str) -> None:
    with pytest.raises(UsageError, match="no store for") as caught:
        open_store(root)
    assert "HU" not in str(caught.value)


@pytest.mark.parametrize("root", ["s3:/bucket/run1", Path("s3://bucket/run1"), Path("file:///mnt")])
def test_a_url_that_has_lost_a_slash_is_no_directory(root: str | Path) -> None:
    with pytest.raises(UsageError, match="two slashes"):
        open_store(root)


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_what_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(UsageError, match="must be a path"):
        open_store(root)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_store(tmp_path / "run1")
    assert list(tmp_path.iterdir()) == []


def changed(place: Path) -> dict[Path, int]:
    """When each name below `place` was last changed."""
    return {path: path.stat().st_ctime_ns for path in place.rglob("*")}


async def test_what_is_opened_to_be_read_cannot_be_written_to(tmp_path: Path) -> None:
    root = tmp_path / SERVICE  # one that could show files, too
    async with open_store(root) as store:
        await store.put("tag/a", b"1")
    before = changed(tmp_path)
    async with open_store(root, read_only=True) as store:
        assert (await store.get("tag/a"), await store.stat("tag/a")) == (b"1", 1)
        assert [entry.name for entry in await store.list("")] == ["tag"]
        out = bytearray(1)
        await store.get_range("tag/a", 0, memoryview(out))
        assert out == b"1"
        with pytest.raises(NotFoundError):
            await store.get("tag/b")
        plain = plain_files_of(store)
        assert plain is not None
        assert not await plain.is_there("tag")
        writes = (
            store.put("tag/b", b""),
            store.put_if_absent("tag/b", b""),
            store.put_if_match("tag/a", b"1", b"2"),
            store.open_writer("tag/c", size_hint=1),
            store.delete("tag/a"),
            store.settle("tag/a"),
            plain.publish("hidden-1-0", "tag", {"a": "tag/a"}, {}, None),
            plain.point("", "tag"),
        )
        for write in writes:
            with pytest.raises(StoreError, match="opened to be read"):
                await write
        with pytest.raises(OSError, match="opened to be read"):
            async with plain.alone():
                raise AssertionError("the lock was taken")
        assert await store.sweep() == 0
    assert changed(tmp_path) == before
    with pytest.raises(UsageError, match="exists only in the process"):
        open_store("memory://node0", read_only=True)


@pytest.mark.parametrize("root", ["~", "~/runs/a", "~root/a"])
def test_a_home_directory_that_no_shell_expanded_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    meant = os.path.expanduser(root)
    with pytest.raises(UsageError, match=rf"only a shell expands it: give '{meant}', or '\./{root}'"):
        open_store(root)
    assert open_store(f"./{root}").url == os.path.abspath(root)
    with pytest.raises(UsageError, match="there is no such user here"):
        open_store("~nobody-has-this-name/a")


@pytest.mark.parametrize(
    ("root", "meant"),
    [
        ("$HOME", "give '/home/me'"),
        ("${HOME}/runs/a", "give '/home/me/runs/a'"),
        ("/scratch/$USER/a", "give '/scratch/me/a'"),
        ("/scratch/run-$USER", "give '/scratch/run-me'"),
        ("file:///scratch/$USER", r"^the URL has a variable .*expandvars"),
        ("s3://bucket/$USER/a", r"^the URL has a variable .*expandvars"),
        ("/scratch/$NOT_SET/a", r"\$NOT_SET is not set here"),
        ("/scratch/run-${NOT_SET}", r"\$\{NOT_SET\} is not set here"),
    ],
)
def test_a_variable_that_no_shell_has_replaced_is_refused_with_the_path_that_was_meant(
    root: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USER", "me")
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(UsageError, match=meant):
        open_store(root)


def test_a_dollar_that_begins_no_name_of_a_variable_is_one_of_the_path(tmp_path: Path) -> None:
    for name in ("a$", "$", "us$5", "a$not_set", "$1"):
        assert open_store(tmp_path / name).url == str(tmp_path / name)


@pytest.mark.parametrize("path", ["~/there", "$HOME/there", "/data/$USER/there"])
def test_every_path_that_is_given_is_refused_in_this_way(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a spool, an export or a socket would lie in a directory `~` or `$HOME` where the process began."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USER", "me")
    monkeypatch.chdir(tmp_path)
    root = "/data/run"

    def serve(**options: object) -> object:
        return ServeConfig(**{"socket": "/run/socket", "roots": ("/data",), **options})  # type: ignore[arg-type]

    gives: list[Callable[[], object]] = [
        lambda: Checkpointer(path),
        lambda: Checkpointer(root, spool=path),
        lambda: Checkpointer(root, sidecar=path),
        lambda: Checkpointer(root, export=ExportConfig(to=path)),
        lambda: open_checkpoint(path),
        lambda: list_checkpoints(path),
        lambda: rollback(path, "a"),
        lambda: SpoolConfig(directory=path),
        lambda: ServedMirror(origin=path, mirror=root),
        lambda: serve(socket=path),
        lambda: serve(roots=(path,)),
        lambda: Output(path, directory=True),
        *(
            lambda option=option: _settings(option)  # type: ignore[misc]
            for option in ({"socket": path}, {"spool": path}, {"roots": [path]}, {"mirrors": [f"/a={path}"]})
        ),
    ]
    for give in gives:
        with pytest.raises(UsageError, match="only a shell"):
            give()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("root", ["/", "//", "/.", "/tmp/..", "file:///", "/.checkpointd", "//.checkpointd"])
def test_the_top_of_the_file_system_is_no_root(root: str) -> None:
    with pytest.raises(UsageError, match="give checkpoints a directory of their own"):
        open_store(root)


async def test_two_slashes_at_the_beginning_are_one(tmp_path: Path) -> None:
    async with open_store(f"/{tmp_path}/root") as store:
        assert await asyncio.wait_for(store.put_if_absent("t/a", b"1"), 60.0)
        assert store.url == f"{tmp_path}/root"
