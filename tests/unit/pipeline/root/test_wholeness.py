"""What is missing of a checkpoint is named, with the ranks that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.errors import DamagedError
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import ballot_key
from checkpointd.pipeline.root.wholeness import check_whole
from checkpointd.store.patient import Patience
from checkpointd.store.posix.store import PosixStore
from tests.builders import save_checkpoint


@pytest.mark.parametrize(
    ("names", "rank", "words"),
    [
        (("00002.index",), 2, "(rank 2 wrote it)"),
        (("00001.index", "00002.index"), 1, "(ranks 1-2 wrote them)"),
        (("ballot",), 0, "(rank 0 wrote it)"),
    ],
)
async def test_what_is_gone_is_named_with_the_ranks_that_wrote_it(
    tmp_path: Path, names: tuple[str, ...], rank: int, words: str
) -> None:
    async with PosixStore(tmp_path / "root") as store:
        await save_checkpoint(store, world_size=3)
        [checkpoint] = await root_view.checkpoints(store)
        await check_whole(store, checkpoint, Patience(1.0, 0.01))
        names = tuple(ballot_key(checkpoint.commit).rpartition("/")[2] if name == "ballot" else name for name in names)
        for name in names:
            (tmp_path / "root" / checkpoint.prefix / name).unlink()
        with pytest.raises(DamagedError) as caught:
            await check_whole(store, checkpoint, Patience(1.0, 0.01))
    assert (caught.value.key, caught.value.rank) == (f"{checkpoint.prefix}/{names[0]}", rank)
    assert words in str(caught.value)
