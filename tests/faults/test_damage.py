"""A flipped bit, a truncation, a missing file: at every kind of object, found before any tensor is touched, and said.

What load() may do, whatever is damaged: load the newest checkpoint, every bit of it right; load the one before and log an error
that names the object; or raise. Never anything else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpointd.cli import program
from checkpointd.codec import Compression
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, LinkError, NotFoundError, PartlyLoadedError
from checkpointd.pipeline.root import catalog
from checkpointd.report.latest import pointer
from checkpointd.report.verification import Verification, tasks, verified
from checkpointd.store import open_store
from checkpointd_client import Checkpointer
from checkpointd_client.loaded import Loaded
from tests.builders import break_file
from tests.faults.predictable_training import KIB, Training

pytestmark = pytest.mark.usefixtures("short_looks")

SEED = 3
NBYTES = 160 * KIB
ABSENCE_S = 0.1
"""How long what was removed here is looked for."""
FAULTS = ("flip", "truncate", "remove")

NEWEST = "global_step2/00000001-1"
"""The second attempt at its tag; the first was replaced and has a `deleted` mark."""
VERIFIED_OBJECTS = {
    "chunks": f"{NEWEST}/00000-*.chunks",
    "index": f"{NEWEST}/00000.index",
    "ballot": f"{NEWEST}/ballot",
}
"""What loading reads: damage there costs the checkpoint, and nothing else."""
OUTCOME = f"{NEWEST}/outcome"
UNREAD_OBJECTS = {
    "start": ".checkpointd/starts/00000001",
    "deleted": "global_step2/00000001-0/deleted",
    "vote that was counted": f"{NEWEST}/00000.vote",
    "vote of a replaced attempt": "global_step2/00000001-0/00000.vote",
    "outcome of a replaced attempt": "global_step2/00000001-0/outcome",
}
"""What loading does without: damage there costs nothing."""


def new_training() -> Training:
    """Objects that hold something else than any checkpoint."""
    training = Training(seed=SEED, rank=0, nbytes=NBYTES)
    training.advance(99)
    return training


def saved(root: Path, compression: Compression) -> Path:
    """A root with two checkpoints, of step 1 and, saved twice, of step 2."""
    training = Training(seed=SEED, rank=0, nbytes=NBYTES)
    with Checkpointer(root, compression=compression, chunk_bytes=8 * KIB, dedup=False) as ckpt:
        for step in (1, 2, 2):
            training.advance(step)
            ckpt.save(step, training.state, client_state=training.client_state).wait()
    return root


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("raw") / "root", "none")


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("encoded") / "root", "planes")


@pytest.fixture
def root(raw: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(raw, tmp_path / "root"))


def only(root: Path, pattern: str) -> str:
    """The key of the one object that `pattern` names."""
    [path] = root.glob(pattern)
    return path.relative_to(root).as_posix()


def load(ckpt: Checkpointer, **options: object) -> tuple[Training, Loaded]:
    training = new_training()
    loaded = ckpt.load(training.state, **options)  # type: ignore[arg-type]  # options of load(), named by the test
    assert loaded is not None
    return training, loaded


def errors(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR)


def must_load(ckpt: Checkpointer, step: int) -> Loaded:
    training, loaded = load(ckpt)
    assert (loaded.step, training.wrong(step)) == (step, [])
    assert loaded.client_state == {"seed": SEED, "step": step}
    return loaded


def must_save_and_load(ckpt: Checkpointer, *steps: int) -> None:
    """The damage does not spoil what is saved from now on."""
    training = new_training()
    for step in steps:
        training.advance(step)
        ckpt.save(step, training.state, client_state=training.client_state).wait()
        must_load(ckpt, step)


def verdict(root: Path) -> Verification:
    """What `checkpointd verify` finds."""

    async def found() -> Verification:
        async with open_store(root) as store:
            verdicts = await verified(store, await tasks(store, None), config=LoadConfig(absence_s=ABSENCE_S))
            return Verification(
                root=str(root), checkpoints=tuple(verdicts), latest=await pointer(store, await catalog.checkpoints(store))
            )

    return asyncio.run(found())


def test_without_damage_everything_is_found_whole(root: Path) -> None:
    """Otherwise the tests below would show nothing."""
    for pattern in (*VERIFIED_OBJECTS.values(), OUTCOME, *UNREAD_OBJECTS.values()):
        assert (root / only(root, pattern)).stat().st_size > 0
    assert verdict(root).damage == []
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        assert must_load(ckpt, 2).fell_back_from == ()


# --- what loading reads ---


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", VERIFIED_OBJECTS)
def test_damage_to_what_is_read(root: Path, kind: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    damage_what_is_read(root, kind, fault, caplog)


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_to_encoded_chunks(encoded: Path, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    damage_what_is_read(Path(shutil.copytree(encoded, tmp_path / "root")), "chunks", fault, caplog)


def damage_what_is_read(root: Path, kind: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    key = only(root, VERIFIED_OBJECTS[kind])
    break_file(root / key, fault)

    [found] = verdict(root).damage
    assert (found.key, found.rank) == (key, 0)
    assert key in found.message

    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        loaded = must_load(ckpt, 1)
        assert key in loaded.fell_back_from[0]
        assert f"global_step2 cannot be loaded: {loaded.fell_back_from[0]}" in errors(caplog)
        for options in ({"tag": "global_step2"}, {"fallback": False}):
            training = new_training()
            unseen = kind == "chunks" and fault == "flip"  # no look at names and sizes shows it
            with pytest.raises(PartlyLoadedError if unseen else DamagedError, match=re.escape(key)):
                ckpt.load(training.state, **options)
            assert unseen or training.wrong(99) == [], "the objects were touched"
            training = new_training()
            with pytest.raises(DamagedError, match=r"rank 0") as caught:
                ckpt.load(training.state, **options, verify_first=True)
            assert (caught.value.key, caught.value.rank) == (key, 0)
            assert bool(caught.value.fqn) is unseen
            assert caught.value.fqn in str(caught.value)
            assert training.wrong(99) == [], "the objects were touched"
        must_save_and_load(ckpt, 3, 2)


@pytest.mark.parametrize("kind", VERIFIED_OBJECTS)
def test_damage_to_every_checkpoint_raises(root: Path, kind: str) -> None:
    newest = only(root, VERIFIED_OBJECTS[kind])
    oldest = newest.replace(NEWEST, "global_step1/00000001-0")
    for key in (newest, oldest):
        break_file(root / key, "flip")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        touched = PartlyLoadedError if kind == "chunks" else DamagedError
        for verify_first, error in ((True, DamagedError), (False, touched)):
            training = new_training()
            with pytest.raises(error, match="no whole checkpoint is left") as caught:
                ckpt.load(training.state, verify_first=verify_first)
            assert newest in str(caught.value)
            assert oldest in str(caught.value)
            assert ("mixture" in str(caught.value)) is (error is PartlyLoadedError)
            assert error is PartlyLoadedError or training.wrong(99) == []
        must_save_and_load(ckpt, 3)


# --- the outcome ---


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_a_damaged_outcome(root: Path, fault: str, restarted: bool, caplog: pytest.LogCaptureFixture) -> None:
    if restarted:
        break_file(root / OUTCOME, fault)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        if not restarted:
            break_file(root / OUTCOME, fault)
        [found, *others] = verdict(root).damage
        assert found.key == OUTCOME
        assert all(damage.key == "latest" for damage in others)
        loaded = must_load(ckpt, 1)
        assert OUTCOME in loaded.fell_back_from[0]
        assert OUTCOME in errors(caplog)
        for options in ({"tag": "global_step2"}, {"fallback": False}):
            with pytest.raises(DamagedError, match=OUTCOME) as caught:
                ckpt.load(new_training().state, **options)
            assert caught.value.key == OUTCOME
        must_save_and_load(ckpt, 3, 2)


def test_a_missing_outcome_is_decided_again_at_the_next_start(root: Path) -> None:
    """All votes are there: that is how a job that died before the commit leaves it."""
    break_file(root / OUTCOME, "remove")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        must_load(ckpt, 2)
        must_save_and_load(ckpt, 3, 2)


def test_an_outcome_that_goes_missing_meanwhile_is_no_silent_step_back(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        break_file(root / OUTCOME, "remove")
        assert "latest names global_step2" in must_load(ckpt, 1).fell_back_from[0]
        assert "latest names global_step2" in errors(caplog)
        with pytest.raises(DamagedError, match="latest names global_step2"):
            ckpt.load(new_training().state, fallback=False)
        with pytest.raises(NotFoundError, match=r"global_step2 is not a checkpoint: .*00000001-1 is in-doubt"):
            ckpt.load(new_training().state, tag="global_step2")
        must_save_and_load(ckpt, 3, 2)


def test_an_older_outcome_that_is_damaged_stops_only_a_load_of_its_tag(root: Path) -> None:
    key = "global_step1/00000001-0/outcome"
    break_file(root / key, "flip")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        for options in ({}, {"fallback": False}):
            training, loaded = load(ckpt, **options)
            assert (loaded.step, training.wrong(2), loaded.fell_back_from) == (2, [], ())
        with pytest.raises(DamagedError, match=key):  # the catalog tells that it is older, so only a load of its tag reads it
            ckpt.load(new_training().state, tag="global_step1")


# --- what loading does without ---


@pytest.mark.nightly
@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", UNREAD_OBJECTS)
def test_damage_to_what_is_not_read(root: Path, kind: str, fault: str, restarted: bool) -> None:
    path = root / only(root, UNREAD_OBJECTS[kind])
    if restarted:
        break_file(path, fault)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        if not restarted:
            break_file(path, fault)
        training, loaded = load(ckpt, fallback=False)
        assert (loaded.tag, loaded.step, training.wrong(2)) == ("global_step2", 2, [])
        must_save_and_load(ckpt, 3, 2)
        assert ckpt.latest() == "global_step2"
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        must_load(ckpt, 2)
        must_save_and_load(ckpt, 4, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_plan_costs_nothing_and_the_next_start_removes_it(root: Path, fault: str) -> None:
    key = only(root, ".checkpointd/plans/*/*/*")
    break_file(root / key, fault)
    assert verdict(root).damage == []
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        must_save_and_load(ckpt, 3)
    assert not (root / key).exists()


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_a_pointer_that_names_another_tag_is_told_until_the_next_commit(
    root: Path, fault: str, restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell it from one whose checkpoint is gone; what is loaded is the newest all the same."""
    if restarted:
        break_file(root / "latest", fault)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        if not restarted:
            break_file(root / "latest", fault)
        with pytest.raises(DamagedError, match="latest names"):
            ckpt.load(new_training().state, fallback=False)
        assert "latest names" in must_load(ckpt, 2).fell_back_from[0]
        assert "latest names" in errors(caplog)
        must_save_and_load(ckpt, 3, 2)
        assert ckpt.latest() == "global_step2"


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_a_damaged_pointer_and_recover_mends_it(root: Path, fault: str) -> None:
    break_file(root / "latest", fault)
    report = verdict(root).latest
    assert report is not None
    assert report.damage or report.behind
    assert program.run(["recover", str(root)]) == 0
    assert (root / "latest").read_text() == "global_step2\n"
    assert verdict(root).damage == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_start_is_not_begun_again(root: Path, fault: str) -> None:
    """Attempts of two jobs under one name would overwrite each other."""
    break_file(root / ".checkpointd/starts/00000001", fault)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        assert ckpt.status().start == 2


# --- anything, anywhere ---


@dataclass(frozen=True)
class Flip:
    key: str
    byte: int
    bit: int

    def do(self, root: Path) -> None:
        data = bytearray((root / self.key).read_bytes())
        data[self.byte] ^= 1 << self.bit
        (root / self.key).write_bytes(data)


def flips(root: Path, seed: int, count: int) -> Iterator[Flip]:
    """Of every object about as many, small ones and large ones alike."""
    chance = random.Random(seed)
    keys = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    keys = [key for key in keys if (root / key).stat().st_size]
    for number in range(count):
        key = keys[number % len(keys)]
        yield Flip(key, chance.randrange((root / key).stat().st_size), chance.randrange(8))


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "compression"), [(0, "raw"), (1, "encoded")])
def test_random_flips_never_give_a_wrong_bit(
    request: pytest.FixtureRequest, tmp_path: Path, seed: int, compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    fell_back, whole = 0, request.getfixturevalue(compression)
    for number, flip in enumerate(flips(whole, seed, 60)):
        root = Path(shutil.copytree(whole, tmp_path / str(number)))
        flip.do(root)
        caplog.clear()
        with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
            training, loaded = load(ckpt)  # one of them is always whole
        assert loaded.step in (1, 2), (seed, flip)
        assert training.wrong(loaded.step) == [], (seed, flip)
        if loaded.step == 1:
            fell_back += 1
            assert flip.key.startswith(NEWEST), (seed, flip)
            assert flip.key in errors(caplog), (seed, flip)
    assert fell_back > 0


# --- the newest is gone -----------------------------------------------------------------------------------------------


LOST = {
    "its tag": "global_step2",
    "its attempt": NEWEST,
    "its outcome and its vote": f"{NEWEST}/[o0]*[et]",
}


def lose(root: Path, what: str) -> None:
    for path in root.glob(LOST[what]):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("what", LOST)
def test_the_newest_is_gone(root: Path, what: str, restarted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A start leaves the pointer, so that each load can tell; the next commit moves it on."""
    if restarted:
        lose(root, what)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        if restarted:
            assert "latest names global_step2, which cannot be loaded" in errors(caplog)
            assert "which was committed later" not in caplog.text
        else:
            lose(root, what)
        for _ in range(2):
            with pytest.raises(DamagedError, match=r"latest names global_step2, which .*Bring it back.* recover ") as caught:
                ckpt.load(new_training().state, fallback=False)
            assert caught.value.key == "latest"
        assert "latest names global_step2, which cannot be loaded" in must_load(ckpt, 1).fell_back_from[0]
        must_save_and_load(ckpt, 3, 2)
        assert (root / "latest").read_text() == "global_step2\n"
        assert load(ckpt, fallback=False)[1].fell_back_from == ()


@pytest.mark.parametrize("options", [{}, {"fallback": False}])
def test_a_link_at_the_newest_is_named_and_not_called_gone(
    root: Path, tmp_path: Path, options: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """CANDIDATE-1: nobody is told to give up a checkpoint that lies elsewhere, and `recover` gives none up."""
    away = tmp_path / "away"
    (root / "global_step2").rename(away)
    (root / "global_step2").symlink_to(away)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        assert "global_step2 is a symbolic link" in errors(caplog)
        with pytest.raises(LinkError, match=r"global_step2 is a symbolic link.*move its target there"):
            ckpt.load(new_training().state, **options)
    assert "it is gone" not in errors(caplog)
    program.run(["recover", str(root)])
    assert (root / "latest").read_text() == "global_step2\n"
    (root / "global_step2").unlink()
    away.rename(root / "global_step2")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        must_load(ckpt, 2)


def test_the_newest_is_gone_and_so_is_every_other(root: Path) -> None:
    for tag in ("global_step1", "global_step2"):
        shutil.rmtree(root / tag)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt, pytest.raises(DamagedError, match="latest names global_step2"):
        ckpt.load(new_training().state, fallback=False)


def test_every_checkpoint_was_removed_by_hand(
    root: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that begins afresh goes on without one; any other one once a person has accepted the loss."""
    for tag in ("global_step1", "global_step2"):
        shutil.rmtree(root / tag)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt, pytest.raises(DamagedError, match="removes latest if none is left"):
        ckpt.load(new_training().state)
    with Checkpointer(root, absence_s=ABSENCE_S, afresh=True) as ckpt:
        caplog.clear()
        assert ckpt.load(new_training().state) is None
        assert "latest names global_step2, which cannot be loaded" in errors(caplog)
    for more in (["--dry-run"], []):
        assert program.run(["recover", str(root), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["latest_removed"]
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        assert ckpt.load(new_training().state) is None
        must_save_and_load(ckpt, 3, 2)
