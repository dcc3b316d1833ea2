"""Every kind of object of the format, damaged in every way: what is read is right or refused, and no other checkpoint is lost.

`--damage-stride=1` runs the whole table; otherwise each so manieth cell runs. A cell is one object and one damage.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.cli import program
from checkpointd.errors import DamagedError, PartlyLoadedError
from checkpointd_client import Checkpointer
from tests import every_object
from tests.every_object import KINDS, LATER, NEWEST, STEPS, client_state, keys_of, values
from tests.forged_roots import edited, opened

ABSENCE_S = 0.05
FOR_LATEST = [tag for tag in STEPS if tag != "best"]
"""The checkpoints that a load without a tag may take, oldest first."""
CHUNKS = ("raw chunks", "encoded chunks")
READ = (*CHUNKS, "index", "ballot", "joint plan")
"""The kinds whose damage costs their checkpoint: `verify` finds it."""
DAMAGED_CODE = 5

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("every-object"),
    pytest.mark.usefixtures("short_looks"),
]


# --- damage ---------------------------------------------------------------------------------------------------------------


def missing(path: Path, _: Path) -> None:
    path.unlink()


def empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path: Path, _: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes(min(4096, len(data))) + data[4096:])


def flipped(path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0 if path.suffix == ".chunks" else len(data) // 3] ^= 1  # between chunks may be padding
    path.write_bytes(data)


def moved(path: Path, other: Path) -> None:
    """An object of the same kind, of another attempt or rank, lies in its place."""
    path.write_bytes(other.read_bytes())


def stale(path: Path, _: Path) -> None:
    """What it was earlier, of the objects that change."""
    data = path.read_bytes()
    path.write_bytes(b"global_step4\n" if path.name == "latest" else edited(data, count=max(0, opened(data)["count"] - 1)))


DAMAGE: tuple[Callable[[Path, Path], None], ...] = (missing, empty, truncated, zeroed, flipped, moved, stale)
CHANGING = ("latest", "lease of an attempt", "lease of a job")


OF_SAVES = ("index", "vote", "ballot", "joint plan")
SEVERAL = (*OF_SAVES, *CHUNKS[:2], "entry", "state")
"""The kinds of which the root has more than one object."""


def cells() -> list[tuple[str, str, str]]:
    """Each damage to the newest object of each kind, to the first one, and to one of an older checkpoint, if they differ."""
    objects = (
        [(kind, "newest") for kind in KINDS] + [(kind, "first") for kind in SEVERAL] + [(kind, "older") for kind in OF_SAVES]
    )
    return [(*one, damage.__name__) for one in objects for damage in DAMAGE if damage is not stale or one[0] in CHANGING]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        stride = metafunc.config.getoption("--damage-stride")
        metafunc.parametrize("cell", cells()[::stride], ids=", ".join)


def target(root: Path, kind: str, which: str) -> Path:
    found = keys_of(root, kind)
    tags = {"first": [""], "older": FOR_LATEST[:-1], "newest": FOR_LATEST[-1:]}[which]
    of_tags = [key for key in found if key.startswith(tuple(tags))] or found
    return root / of_tags[0 if which == "first" else -1]


def twin(root: Path, kind: str, path: Path) -> Path:
    """Another object of this kind with other bytes, of another attempt if there is one; otherwise an object of another kind."""
    others = [root / key for key in keys_of(root, kind) if (root / key).read_bytes() != path.read_bytes()]
    others.sort(key=lambda other: other.parent == path.parent)
    return [*others, root / keys_of(root, "ballot")[0]][0]


# --- the roots ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_object.make(tmp_path_factory.mktemp("every object"))


@dataclass(frozen=True)
class Effect:
    """What damage may cost, as tags."""

    found: set[str]
    """`verify` must call these damaged."""
    suspected: set[str]
    """It may call these damaged, and a list need not have them as checkpoints."""
    lost: set[str]
    """No load needs to take these any more."""


def effect(root: Path, kind: str, damage: str, path: Path) -> Effect:
    """What the damage costs, from the root before it."""
    key = path.relative_to(root).as_posix()
    own = {tag for tag, folder in checkpoints(root).items() if kind in READ and path.parent == folder}
    others = {tag for tag, folder in checkpoints(root).items() if any(key in refers(vote) for vote in folder.glob("*.vote"))}
    if kind == "joint plan":
        return Effect(own, own, set())
    return Effect(own, own | others, own | others)


def refers(vote: Path) -> list[str]:
    return list(opened(vote.read_bytes()).get("refers", ()))


def checkpoints(root: Path) -> Mapping[str, Path]:
    """The attempt of each checkpoint."""
    return {tag: max((root / tag).iterdir()) for tag in STEPS}


def contents(root: Path) -> dict[str, str]:
    found = (path for path in root.rglob("*") if path.is_file() and path.name not in ("lock", "ballast", "README"))
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


# --- what is done with them -----------------------------------------------------------------------------------------------


class Commands:
    """Runs commands of the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, root: Path, *words: str) -> dict[str, Any]:
        self._capsys.readouterr()
        code = program.run([words[0], str(root), *words[1:], "--json"])
        told = self._capsys.readouterr()
        assert code in (0, DAMAGED_CODE), (words, code, told)
        found: dict[str, Any] = json.loads(told.out)
        return found


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


def listed(commands: Commands, root: Path) -> set[str]:
    return {row["tag"] for row in commands(root, "list")["rows"] if row["state"] == "committed"}


def load(ckpt: Checkpointer, **options: Any) -> int:
    """The step that was loaded, every bit of it right."""
    model = {name: torch.zeros_like(value) for name, value in values(0).items()}
    found = ckpt.load({"model": model}, **options)
    assert found is not None
    assert [name for name, value in values(found.step).items() if not torch.equal(model[name], value)] == []
    assert found.client_state == client_state(found.step)
    return found.step


# --- the table ------------------------------------------------------------------------------------------------------------


def test_the_root_has_every_kind_and_is_whole(whole: Path, tmp_path: Path, commands: Commands) -> None:
    root = Path(shutil.copytree(whole, tmp_path / "root"))
    assert [kind for kind in KINDS if not keys_of(root, kind)] == []
    assert listed(commands, root) == set(STEPS)
    verdicts = commands(root, "verify")
    assert {verdict["tag"]: verdict["state"] for verdict in verdicts["checkpoints"]} == dict.fromkeys(STEPS, "whole")
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        assert load(ckpt) == NEWEST
        for tag, step in STEPS.items():
            assert load(ckpt, tag=tag) == step


def test_damage(
    cell: tuple[str, str, str], whole: Path, tmp_path: Path, commands: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    kind, which, name = cell
    root = Path(shutil.copytree(whole, tmp_path / "root"))
    path = target(root, kind, which)
    costs = effect(root, kind, name, path)
    next(damage for damage in DAMAGE if damage.__name__ == name)(path, twin(root, kind, path))
    look(commands, root, costs)
    go_on(commands, root, costs, caplog)


def look(commands: Commands, root: Path, costs: Effect) -> None:
    """Commands that only read find the damage, and every checkpoint that it does not touch."""
    before = contents(root)
    assert set(STEPS) - costs.suspected <= listed(commands, root) <= set(STEPS)
    commands(root, "status")
    verdicts = commands(root, "verify")["checkpoints"]
    assert costs.found <= {verdict["tag"] for verdict in verdicts if verdict["state"] != "whole"} <= costs.suspected
    assert contents(root) == before


def go_on(commands: Commands, root: Path, costs: Effect, caplog: pytest.LogCaptureFixture) -> None:
    """A start, a load, a save and `gc`: the newest that is left is loaded, and what the damage does not touch stays."""
    newest_left, saved = [tag for tag in FOR_LATEST if tag not in costs.lost][-1], f"global_step{LATER + 1}"
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        step = load(ckpt)
        said = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert step == NEWEST or (step == STEPS[newest_left] and said)
        assert costs.lost or costs.found or set(STEPS) <= listed(commands, root)
        ckpt.save(LATER + 1, {"model": values(LATER + 1)}, client_state=client_state(LATER + 1)).wait()
        assert load(ckpt) == LATER + 1
    commands(root, "gc", "--keep-last", "3")
    left = listed(commands, root)
    assert {saved, newest_left} - costs.suspected <= left <= {*STEPS, saved}
    with Checkpointer(root, absence_s=ABSENCE_S) as ckpt:
        for tag in left - {saved}:
            try:
                assert load(ckpt, tag=tag) == STEPS[tag]
            except (DamagedError, PartlyLoadedError):
                assert tag in costs.lost
        assert load(ckpt) == LATER + 1
