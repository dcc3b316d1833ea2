"""A flipped bit, a truncation, a missing file: at every kind of object, found before any tensor is touched, and said.

What load() may do, whatever is damaged: load the newest checkpoint, every bit of it right; load the one before and log an error
that names the object; or raise. Never anything else.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from pathlib import Path

import pytest

from checkpointd.cli import program
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, PartlyLoadedError, UnreadableError
from checkpointd.report.verification import Verification, to_verify, verification, verified
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
"""The second attempt at its tag, which took the place of the first."""
VERIFIED_OBJECTS = {
    "chunks": f"{NEWEST}/00000-*.chunks",
    "index": f"{NEWEST}/00000.index",
    "ballot": f"{NEWEST}/ballot-*",
}
"""What loading reads: damage there costs the checkpoint, and nothing else."""


def new_training() -> Training:
    """Objects that hold something else than any checkpoint."""
    training = Training(seed=SEED, rank=0, nbytes=NBYTES)
    training.advance(99)
    return training


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two checkpoints, of step 1 and, saved twice, of step 2."""
    root = tmp_path_factory.mktemp("raw") / "root"
    training = Training(seed=SEED, rank=0, nbytes=NBYTES)
    with Checkpointer(root, compression="none", chunk_bytes=8 * KIB, dedup=False) as ckpt:
        for step in (1, 2, 2):
            training.advance(step)
            ckpt.save(step, training.state, client_state=training.client_state).wait()
    return root


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
            verdicts = await verified(store, await to_verify(store, None), config=LoadConfig(absence_s=ABSENCE_S))
            return await verification(store, verdicts, of_all=True)

    return asyncio.run(found())


# --- what loading reads ---


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", VERIFIED_OBJECTS)
def test_damage_to_what_is_read(root: Path, kind: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
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


# --- the newest is gone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [True, False])
@pytest.mark.parametrize("what", ["global_step2", NEWEST])
def test_the_newest_is_gone(root: Path, what: str, restarted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The log still has it, so no load takes an older one without a word."""
    if restarted:
        shutil.rmtree(root / what)
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        if not restarted:
            shutil.rmtree(root / what)
        for _ in range(2):
            with pytest.raises(DamagedError, match=re.escape(NEWEST)):
                ckpt.load(new_training().state, fallback=False)
        assert NEWEST in must_load(ckpt, 1).fell_back_from[0]
        assert NEWEST in errors(caplog)
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
    named = pytest.raises(UnreadableError, match=r"global_step2 is a symbolic link.*move its target there")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt, named:
        ckpt.load(new_training().state, **options)
    assert "gone" not in caplog.text
    assert "global_step2 is a symbolic link" in caplog.text
    program.run(["recover", str(root)])
    assert (root / "latest").read_text() == "global_step2\n"
    (root / "global_step2").unlink()
    away.rename(root / "global_step2")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        must_load(ckpt, 2)
