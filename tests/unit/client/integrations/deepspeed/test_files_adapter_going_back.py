"""Going back to an older tag with `layout="deepspeed"`, by load_checkpoint(tag=...) or by rollback."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.errors import DamagedError
from checkpointd.report.listing import listing
from checkpointd.store import open_store
from checkpointd_client import rollback
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.integrations.huggingface.filling import Filled
from tests.unit.client.integrations.deepspeed.deepspeed_engine import FILE, Engine

pytestmark = pytest.mark.usefixtures("short_looks")


@contextmanager
def attached(**settings: Any) -> Iterator[FilesAdapter]:
    plug = FilesAdapter(Engine(), settings)
    plug.connect()
    try:
        yield plug
    finally:
        plug.detach()


def save(plug: FilesAdapter, folder: Path, *steps: int, weight: float | None = None) -> None:
    for step in steps:
        plug.engine.global_steps = step
        plug.engine.module.weight.data.fill_(step if weight is None else weight)
        plug.save_checkpoint(str(folder))
        plug.wait(60)


def load(plug: FilesAdapter, folder: Path, step: int | None = None) -> str | None:
    found: str | None = plug.load_checkpoint(str(folder), None if step is None else f"global_step{step}")[1]
    return found


def states(root: Path) -> dict[str, str]:
    """The state of each attempt, by tag and start."""

    async def ask() -> dict[str, str]:
        async with open_store(root / ".checkpointd") as store:
            return {f"{row.tag}/{int(row.attempt[:8])}": row.state for row in (await listing(store)).rows}

    return asyncio.run(ask())


def left(root: Path) -> set[str]:
    return {name for name, state in states(root).items() if state == "left-behind"}


def damage(folder: Path, step: int) -> None:
    """As bit rot does, which changes no time of a file."""
    file = folder / f"global_step{step}" / FILE
    content, before = file.read_bytes(), file.stat()
    file.chmod(0o644)
    file.write_bytes(content[:-40] + bytes(40))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def pointed(folder: Path) -> str:
    return (folder / "latest").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 to 4."""
    with attached() as plug:
        save(plug, tmp_path / "run", 1, 2, 3, 4)
    return tmp_path / "run"


def test_the_first_save_after_a_load_by_tag_leaves_what_came_after_it(folder: Path) -> None:
    with attached() as plug:
        assert load(plug, folder, 2) == "global_step2"
        assert left(folder) == set(), "a load alone changes nothing"
        save(plug, folder, 5)
        assert left(folder) == {"global_step3/1", "global_step4/1"}
        damage(folder, 5)
        assert load(plug, folder) == "global_step2", "and no fallback takes them"
    with attached() as plug:
        assert load(plug, folder, 4) == "global_step4", "by its name it can be loaded still"


def test_a_root_that_was_left_and_is_used_again_goes_on_from_what_was_loaded(folder: Path) -> None:
    with attached() as plug:
        load(plug, folder, 2)
        save(plug, folder.with_name("elsewhere"), 5)
        save(plug, folder, 6)
    assert left(folder) == {"global_step3/1", "global_step4/1"}


def test_rollback_moves_the_latest_that_deepspeed_reads_and_loads_take_it(folder: Path) -> None:
    assert pointed(folder) == "global_step4"
    rollback(folder / ".checkpointd", "global_step2")
    assert pointed(folder) == "global_step2"
    with attached() as plug:
        assert load(plug, folder) == "global_step2"
        assert pointed(folder) == "global_step2", "a start and a load leave it there"
        save(plug, folder, 5)
    assert pointed(folder) == "global_step5"
    rollback(folder / ".checkpointd", "global_step4")
    assert pointed(folder) == "global_step4"
    assert left(folder) == {"global_step5/3"}


def test_rollback_moves_no_latest_to_a_directory_that_is_gone(folder: Path) -> None:
    shutil.rmtree(folder / "global_step2")
    rollback(folder / ".checkpointd", "global_step3")
    assert pointed(folder) == "global_step3"
    shutil.rmtree(folder / "global_step3")
    with attached() as plug:
        assert load(plug, folder) == "global_step1", "and no fallback takes what was left"


def test_a_fallback_takes_nothing_that_was_left_even_if_all_else_is_damaged(folder: Path) -> None:
    rollback(folder / ".checkpointd", "global_step2")
    damage(folder, 2)
    with attached() as plug:
        assert load(plug, folder) == "global_step1"
    damage(folder, 1)
    with attached() as plug, pytest.raises(DamagedError, match="every checkpoint"):
        load(plug, folder)


def test_a_tag_that_is_saved_again_replaces_the_one_that_was_left(folder: Path) -> None:
    """One directory shows one of them, and the other would take space that nobody sees."""
    with attached() as plug:
        load(plug, folder, 2)
        save(plug, folder, 3, weight=30.0)
        save(plug, folder, 5)
    kept = states(folder)
    assert kept["global_step3/2"] == "committed"
    assert kept["global_step4/1"] == "left-behind"
    assert "global_step3/1" not in kept
    assert torch.load(folder / "global_step3" / FILE)["module"]["weight"].eq(30).all()


def test_branch_4_trainings_that_share_a_root_have_branches_of_their_own(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with attached(root=str(tmp_path)) as plug:
        save(plug, one, 1, 2, 3)
        save(plug, other, 1, 2, 3)
        assert load(plug, one, 2) == "global_step2"
        assert load(plug, other) == "global_step3"
        save(plug, one, 4)
        assert left(tmp_path) == {"one--global_step3/1"}
        damage(one, 4)
        assert load(plug, one) == "global_step2"
        save(plug, other, 4)
        assert left(tmp_path) == {"one--global_step3/1"}
    rollback(tmp_path / ".checkpointd", "other--global_step1")
    assert left(tmp_path) == {"one--global_step3/1", *(f"other--global_step{n}/1" for n in (2, 3, 4))}
    assert (pointed(one), pointed(other)) == ("global_step4", "global_step1")


def test_directories_that_a_library_fills_are_of_one_training_and_each_is_loaded_by_its_name(tmp_path: Path) -> None:
    """As the Trainer's `checkpoint-N`, each with an engine's tag."""

    def fill(plug: FilesAdapter, step: int) -> None:
        given = plug._checkpointer(str(tmp_path)).fill(f"checkpoint-{step}")
        plug.filled = Filled(given.name, given.path)
        save(plug, tmp_path / f"checkpoint-{step}", step)
        plug.filled = None

    with attached(root=str(tmp_path)) as plug:
        for step in (1, 2, 3):
            fill(plug, step)
        assert load(plug, tmp_path / "checkpoint-1") == "global_step1"
        fill(plug, 4)
        assert left(tmp_path) == {f"checkpoint-{n}--global_step{n}/1" for n in (2, 3)}
        assert load(plug, tmp_path / "checkpoint-3") == "global_step3"
