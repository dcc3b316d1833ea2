"""Verifying what ranks hold together: every rank's chunks, and that the boxes are the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from checkpointd.config import LoadConfig
from checkpointd.layout.boxes import Box
from checkpointd.layout.plan import PlanComparison
from checkpointd.pipeline.read.verify import CheckpointVerdict, verify
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from tests.builders import Piece, objects, save_checkpoint

TENSOR = np.arange(24, dtype=np.float32).reshape(6, 4)


async def verdict(root: Path, rows: Sequence[tuple[int, int]], dtypes: Sequence[str] = ("float32",) * 3) -> CheckpointVerdict:
    """Three ranks store rows `start:stop` of a tensor, each under its dtype."""

    def pieces(rank: int) -> list[Piece]:
        start, stop = rows[rank]
        return [Piece.part("model.w", TENSOR, Box((start, 0), (stop - start, 4)), dtypes[rank])]

    async with PosixStore(root) as store:
        if not (root / "latest").exists():
            await save_checkpoint(store, world_size=3, tensors=lambda _: {}, pieces=pieces)
        return await verify(store, await root_view.find(store, "global_step1"), LoadConfig())


async def test_a_tensor_that_ranks_hold_together_is_whole(tmp_path: Path) -> None:
    found = await verdict(tmp_path, [(0, 1), (1, 5), (5, 6)])
    assert found.whole
    assert found.bytes_read == TENSOR.nbytes


@pytest.mark.parametrize("rank", range(3))
async def test_damage_to_any_ranks_box_is_named(tmp_path: Path, rank: int) -> None:
    await verdict(tmp_path, [(0, 2), (2, 4), (4, 6)])
    [chunks] = [path for path in objects(tmp_path, ".chunks") if path.name == f"{rank:05d}-0.chunks"]
    data = chunks.read_bytes()
    chunks.unlink()
    chunks.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    [damage] = (await verdict(tmp_path, [])).damage
    assert (damage.key, damage.fqn, damage.rank) == (str(chunks.relative_to(tmp_path)), "model.w", rank)


@pytest.mark.parametrize(
    ("rows", "dtypes", "words"),
    [
        ([(0, 2), (2, 4), (5, 6)], ("float32",) * 3, "model.w (ranks [0, 1, 2]): 4 of 24 elements are written by no rank"),
        ([(0, 2), (2, 5), (4, 6)], ("float32",) * 3, "boxes (2, 0)+(3, 4) and (4, 0)+(2, 4) overlap"),
        (
            [(0, 2), (2, 4), (4, 6)],
            ("float32", "int32", "float32"),
            "model.w is float32[6, 4] on rank 0 and int32[6, 4] on rank 1",
        ),
    ],
)
async def test_ranks_that_did_not_store_one_whole_are_told_apart(
    tmp_path: Path, rows: Sequence[tuple[int, int]], dtypes: Sequence[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No coordinator lets such a checkpoint pass; this one looked away."""
    monkeypatch.setattr("checkpointd.pipeline.outcome.publish.compared", lambda *_: PlanComparison())
    found = await verdict(tmp_path, rows, dtypes)
    [damage] = found.damage
    assert (damage.code, damage.key.partition("-0/ballot-")[0]) == ("FormatError", "global_step1/00000001")
    assert damage.message.startswith("the ranks of global_step1 did not store one whole state: ")
    assert words in damage.message
