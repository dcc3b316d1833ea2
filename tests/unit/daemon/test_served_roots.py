"""Which roots are served: at or below the configured ones, spelt plainly, reached through no symbolic link."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpointd.daemon import served_roots as roots_module
from checkpointd.daemon.served_roots import ServedRoots, check_served
from checkpointd.errors import ClosedError, StoreError, UnreadableError, UsageError
from checkpointd.store.memory import MemoryStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    real = Path(os.path.realpath(tmp_path)) / "served"
    (real / "job" / "run").mkdir(parents=True)
    (real.parent / "served-not").mkdir()
    return real


async def test_a_bucket_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        root = f"s3://bucket/run?endpoint=http://127.0.0.1:{deaf.getsockname()[1]}"
        roots = ServedRoots([root])
        with pytest.raises(UnreadableError, match="Connection refused") as caught:
            await roots.check_answers(root)
        assert f" in {root} failed" in str(caught.value), "with the URL that the user has given"
        await roots.close()


async def test_the_roots_of_a_bucket_are_not_forgotten_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the status would not show them, and not say why they cannot be reached."""

    class Bucket(MemoryStore):
        away = False

        async def stat(self, key: str) -> int | None:
            if self.away:
                raise UnreadableError("Connection refused")
            return await super().stat(key)

    bucket = Bucket()
    roots = ServedRoots(["s3://bucket?region=x"])
    monkeypatch.setattr(roots, "_open", lambda *_: bucket)
    await bucket.put("run/log/root", b"")
    found = await roots.seen_in_buckets()
    assert [root.partition("?")[0] for root in found] == ["s3://bucket/run"]
    bucket.away = True
    assert await roots.seen_in_buckets() == found
    bucket.away = False
    await bucket.delete("run/log/root")
    assert await roots.seen_in_buckets() == [], "it is gone"


async def test_stores_that_ask_once_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs come and go below a bucket, while it is away."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(roots_module, "STORES_KEPT", 2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        options = f"endpoint=http://127.0.0.1:{deaf.getsockname()[1]}"
        roots = ServedRoots([f"s3://bucket?{options}"])
        for number in (1, 2, 3, 3):
            with pytest.raises(UnreadableError, match="Connection refused"):
                await roots.check_answers(f"s3://bucket/run{number}?{options}")
        assert len(roots._impatient) == 2
        await roots.close()


@pytest.mark.parametrize("below", ["", "job", "job/run", "not-there-yet", "job/run/"])
def test_the_configured_one_and_what_lies_below(folder: Path, below: str) -> None:
    assert ServedRoots([str(folder)]).check(f"{folder}/{below}") == str(folder / below)


@pytest.mark.parametrize(
    ("spelt", "why"),
    [
        ("{0}/..", "has '..' in it"),
        ("{0}/job/../job", "has '..' in it"),
        ("{0}/../served-not", "has '..' in it"),
        ("{0}-not", "does not serve"),
        ("{0}-not/job", "does not serve"),
        ("/", "does not serve"),
        ("/etc", "does not serve"),
        ("job", "must be an absolute path"),
        ("", "must be an absolute path"),
        ("~/job", "must be an absolute path"),
        ("{0}/a\0b", "must be an absolute path"),
        ("{0}/a\nb", "must be an absolute path"),
        ("//{0}", "does not serve"),
    ],
)
def test_what_is_refused(folder: Path, spelt: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ServedRoots([str(folder)]).check(spelt.format(str(folder)[1:] if spelt.startswith("//") else folder))


@pytest.mark.parametrize("to", ["/etc", "{0}/job", "../served-not", "no-such-place", "loop"])
def test_a_symbolic_link_is_not_followed_wherever_it_leads(folder: Path, to: str) -> None:
    (folder / "loop").symlink_to(to.format(folder))
    for root in ("loop", "loop/below", "loop/a/b/c"):
        with pytest.raises(UsageError, match="symbolic link"):
            ServedRoots([str(folder)]).check(str(folder / root))


def test_the_configured_one_may_be_a_link_and_is_named_by_what_it_leads_to(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    roots = ServedRoots([str(link)])
    assert roots.check(str(folder / "job")) == str(folder / "job")
    with pytest.raises(UsageError, match="does not serve"):
        roots.check(str(link / "job"))


def test_everything_may_be_served(folder: Path) -> None:
    assert ServedRoots(["/"]).check(str(folder)) == str(folder)


async def test_a_link_that_took_the_place_of_a_root_is_seen_at_the_next_use(folder: Path) -> None:
    roots = ServedRoots([str(folder)])
    roots.store(str(folder / "job"))
    os.rename(folder / "job", folder / "away")
    (folder / "job").symlink_to("/etc")
    with pytest.raises(UsageError, match="symbolic link"):
        roots.store(str(folder / "job"))
    await roots.close()


async def test_a_store_is_opened_once(folder: Path) -> None:
    roots = ServedRoots([str(folder)])
    assert roots.store(f"{folder}/job/") is roots.store(f"{folder}/job")
    assert [root for root, _ in roots._stores] == [f"{folder}/job"]
    await roots.close()
    assert not roots._stores


async def test_stores_that_nobody_uses_are_closed_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_module, "STORES_KEPT", 2)
    roots = ServedRoots([str(folder)])
    names = [str(folder / str(i)) for i in range(5)]
    stores = [roots.store(name) for name in names]
    await roots.trim({names[0]})
    assert [root for root, _ in roots._stores] == [names[0], names[4]]
    with pytest.raises(ClosedError):
        await stores[1].list("")
    assert await stores[0].list("") == []
    await roots.close()


async def test_stores_in_use_stay_though_they_are_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_module, "STORES_KEPT", 1)
    roots = ServedRoots([str(folder)])
    names = {str(folder / str(i)) for i in range(4)}
    for name in names:
        roots.store(name)
    await roots.trim(names)
    assert {root for root, _ in roots._stores} == names
    await roots.close()


def test_a_root_that_shows_files_beside_itself_needs_the_directory_that_they_stand_in(folder: Path) -> None:
    shows = folder / "job" / ".checkpointd"
    assert ServedRoots([str(folder)]).check(str(shows)) == str(shows)
    assert ServedRoots([str(folder / "job")]).check(str(shows)) == str(shows)
    with pytest.raises(UsageError, match=f"does not serve {folder / 'job'}:"):
        ServedRoots([str(shows)]).check(str(shows))


def test_roots_of_plain_files_are_found_too(folder: Path) -> None:
    for place in (folder, folder / "job"):
        (place / ".checkpointd" / "log").mkdir(parents=True)
        (place / ".checkpointd" / "log" / "root").touch()
    assert ServedRoots([str(folder)]).found() == [str(folder / ".checkpointd"), str(folder / "job" / ".checkpointd")]


def test_roots_are_found_at_and_below_the_configured_ones(folder: Path) -> None:
    for root in (folder, folder / "job"):
        (root / "log").mkdir(parents=True)
        (root / "log" / "root").touch()
    (folder / "link").symlink_to(folder / "job")
    assert ServedRoots([str(folder), "/no/such/place"]).found() == [str(folder), str(folder / "job")]


@contextmanager
def as_another_user() -> Iterator[None]:
    """Effective rights of nobody where the tests run as root: root may do everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user reaches: pytest's own are for their owner alone."""
    made = Path(tempfile.mkdtemp(prefix="checkpointd-test-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    ("mode", "words"), [(0o311, "may not list it"), (0o555, "may write neither there nor in any directory")]
)
def test_a_root_without_the_rights_is_refused_with_the_command_that_gives_them(shared: Path, mode: int, words: str) -> None:
    (shared / "run1").mkdir(mode=0o555)
    shared.chmod(mode)
    with as_another_user(), pytest.raises(UsageError) as caught:
        check_served([str(shared)])
    shared.chmod(0o755)
    assert words in str(caught.value)
    assert f"`chmod u+rwx {shared}`" in str(caught.value)


def test_where_only_a_directory_below_can_be_written_a_job_can_have_its_root_there(shared: Path) -> None:
    (shared / "alice").mkdir()
    (shared / "alice").chmod(0o777)
    shared.chmod(0o555)
    with as_another_user():
        check_served([str(shared)])
    shared.chmod(0o755)


async def test_a_file_system_that_does_not_answer_is_no_wrong_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(roots_module, "ANSWER_S", 0.05)
    monkeypatch.setattr(roots_module, "check_served", lambda _: answer.wait())
    with pytest.raises(StoreError, match="has not answered"):
        await ServedRoots([str(folder)]).usable()
    answer.set()
