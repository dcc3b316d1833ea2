"""Hostile roots: refused with a clear error, in bounded memory, and the whole checkpoint before them still loads.

Whoever can write to a root can compute every digest: nothing here is found by a checksum that does not fit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch

from checkpointd.commit.branches import newest_of
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, FormatError, PartlyLoadedError
from checkpointd.layout.keys import START_MAX
from checkpointd.pipeline.outcome import recover as recovering
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.report.explanation import explanation
from checkpointd.report.inspection import inspection
from checkpointd.report.listing import listing
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from tests.builders import restart
from tests.forged_roots import Forger, edited
from tests.unit.hostile_roots import DECIDED, ENTRIES, GIB, UNDECIDED, Case

ROOT = Path(__file__).parents[2]
GOOD, BAD = "global_step1", "global_step2"


def state(fill: float) -> dict[str, object]:
    return {"model": {"weight": torch.full((64, 48), float(fill))}}


def weight(found: dict[str, object]) -> torch.Tensor:
    model = found["model"]
    assert isinstance(model, dict)
    tensor = model["weight"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def make_root(path: Path) -> Path:
    """Two whole checkpoints; the second is there to be forged."""
    with Checkpointer(path, compression="none") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step), client_state={"epoch": 3}).wait()
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made") / "root")


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


def test_an_untouched_root_and_one_that_was_only_sealed_again_load(root: Path) -> None:
    forger = Forger(root, BAD)
    forger.put_index(forger.index())
    found = state(0)
    with Checkpointer(root) as ckpt:
        loaded = ckpt.load(found)
    assert loaded is not None
    assert (loaded.tag, loaded.fell_back_from) == (BAD, ())
    assert (weight(found) == 2).all()


@pytest.mark.parametrize("name", DECIDED)
def test_load_refuses_it_by_name_and_loads_the_one_before_it(name: str, root: Path) -> None:
    refuse_and_fall_back(root, DECIDED[name])


def refuse_and_fall_back(root: Path, case: Case) -> None:
    case.forge(Forger(root, BAD))
    found = state(0)
    with Checkpointer(root) as ckpt:
        with pytest.raises(DamagedError, match=case.words):
            ckpt.load(found, BAD, verify_first=True)
        assert not weight(found).any(), "nothing is touched by what is refused"
        with pytest.raises((DamagedError, PartlyLoadedError), match=case.words):
            ckpt.load(found, fallback=False)
        loaded = ckpt.load(found)
    assert loaded is not None
    assert loaded.tag == GOOD
    assert re.search(case.words, loaded.fell_back_from[0])
    assert (weight(found) == 1).all()


@pytest.mark.parametrize("name", DECIDED)
async def test_the_pipelines_refuse_it_and_nothing_else_escapes_them(name: str, root: Path) -> None:
    await refuse(root, DECIDED[name])


async def refuse(root: Path, case: Case) -> None:
    case.forge(Forger(root, BAD))
    async with PosixStore(root) as store:
        try:
            verdict = await verify(store, await root_view.find(store, BAD), LoadConfig())
            words = " ".join(damage.message for damage in verdict.damage)
            await inspection(store, BAD, values=True)
        except DamagedError as error:
            words = str(error)
        assert (re.search(case.words, words) is not None) == case.verify, words
        assert (await verify(store, await root_view.find(store, GOOD), LoadConfig())).whole
        await explanation(store, BAD)
        await listing(store)


@pytest.mark.parametrize("name", UNDECIDED)
async def test_recovery_decides_it_and_the_job_starts(name: str, root: Path) -> None:
    await decide(root, UNDECIDED[name])


async def decide(root: Path, case: Case) -> None:
    """Recover without the wait for what a file server may yet show."""
    with mock.patch.object(recovering, "ABSENCE_S", 0.02):
        await decide_at_once(root, case)


async def decide_at_once(root: Path, case: Case) -> None:
    forger = Forger(root, BAD)
    case.forge(forger)
    forger.cut_log()
    async with PosixStore(root) as store:
        await restart(store, world_size=1)
        state = await root_view.state_of(store)
        made = {"abort": "aborted", "commit": "checkpoint"}[case.undecided]
        assert state.attempts[f"{BAD}/00000001-0"].status == made
        newest = newest_of(state)
        assert newest is not None
        assert newest.tag == (GOOD if made == "aborted" else BAD)


# --- the log --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
async def test_an_entry_is_refused_and_what_it_committed_is_found_by_the_next_start(name: str, root: Path) -> None:
    await refuse_entry(root, ENTRIES[name])
    found = state(0)
    with Checkpointer(root) as ckpt:
        loaded = ckpt.load(found)
    assert loaded is not None
    assert loaded.tag == BAD
    assert (weight(found) == 2).all()


async def refuse_entry(root: Path, case: Case) -> None:
    """Readers go on with what is proved before it, and say why."""
    case.forge(Forger(root, BAD))
    async with PosixStore(root) as store:
        log = RootLog.of(store)
        await log.look()
        assert re.search(case.words, log.fault), log.fault
        assert [checkpoint.tag for checkpoint in await root_view.checkpoints(store)] == [GOOD]


def test_a_log_of_a_newer_release_is_not_made_again(root: Path) -> None:
    entry = Forger(root, BAD).entry
    entry.write_bytes(edited(entry.read_bytes(), version=4))
    before = sorted(path.name for path in (root / "log").iterdir())
    with pytest.raises(FormatError, match="format version 4"):
        Checkpointer(root)
    assert sorted(path.name for path in (root / "log").iterdir()) == before


async def test_no_start_follows_the_last_one_that_has_a_name(root: Path) -> None:
    async with PosixStore(root) as store:
        log = RootLog.of(store)
        begin = (await log.look()).begin
        assert begin is not None
        assert await log.add(msgspec.structs.replace(begin, start=START_MAX, nonce="0" * 32)) == ""
        with pytest.raises(FormatError, match="has no name"):
            await starts.take(store, 1)


# --- what lies beside checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"../../etc/passwd\n", b"/etc/passwd\n", b"..\n", b"\n", b"", b"\x00" * 20, b"\xff\n", b"a\nb\n", b"x" * 5000, None],
    ids=["traversal", "absolute", "dots", "newline", "empty", "nul", "no text", "two lines", "too long", "1 GiB"],
)
def test_latest_that_names_no_tag_decides_nothing_and_the_next_start_sets_it_right(content: bytes | None, root: Path) -> None:
    if content is None:
        os.truncate(root / "latest", GIB)
    else:
        (root / "latest").write_bytes(content)
    with Checkpointer(root) as ckpt:
        assert ckpt.latest() == BAD
        assert ckpt.load(state(0))
    assert (root / "latest").read_text() == f"{BAD}\n"


@pytest.mark.parametrize("name", [b"..x", b".hidden", b"a\nb", b"\xff\xfe", b" ", b"a\\b", b"\xe2\x80\xae", b"lost+found"])
async def test_folders_that_are_no_tags_are_no_trouble(name: bytes, root: Path) -> None:
    os.makedirs(os.path.join(os.fsencode(root), name, b"00000001-0"))
    async with PosixStore(root) as store:
        assert [checkpoint.tag for checkpoint in await root_view.checkpoints(store)] == [BAD, GOOD]
        await restart(store, world_size=1)


async def test_an_attempt_that_is_a_link_is_not_followed(root: Path, tmp_path: Path) -> None:
    """A log that is made again would otherwise take in what belongs to somebody else."""
    outside = tmp_path / "outside"
    shutil.copytree(root / BAD / "00000001-0", outside)
    before = sorted(path.name for path in outside.iterdir())
    (root / "global_step3").mkdir()
    (root / "global_step3" / "00000001-0").symlink_to(outside)
    (root / "global_step4").symlink_to(tmp_path / "outside")
    (root / "log" / "000000000001.json").write_bytes(b"damaged")
    async with PosixStore(root) as store:
        await restart(store, world_size=1)
        assert [checkpoint.tag for checkpoint in await root_view.checkpoints(store)] == [BAD, GOOD]
    assert sorted(path.name for path in outside.iterdir()) == before


# --- in bounded memory -----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_all_of_it_takes_bounded_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("hostile_roots_process.py"), tmp_path / "root"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(DECIDED) + len(ENTRIES)} cases" in done.stdout, done.stdout
