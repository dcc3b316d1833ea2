"""Jobs of Hugging Face's Trainer and of Accelerate that are killed in the middle of a save, or whose disk is full.

Whatever order `install` and the libraries were imported in, their own functions find no checkpoint that is not whole.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import mounts
from tests.faults.jobs import Job, wait_until
from tests.faults.rank_forker import RankForker

NEEDED = ("deepspeed", "transformers", "accelerate")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
ORDERS = ("before", "after", "accelerate")
POINTS = ("filling", "persisting", "showing", "shown")
KIB, MIB = 1 << 10, 1 << 20
LIMIT_S = 60.0

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("mounts"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install {' '.join(MISSING)}"),
]


@pytest.fixture(scope="module", params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rank_forker(order: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankForker]:
    folder = tmp_path_factory.mktemp("rank_forker")
    with RankForker(folder, "tests.faults.huggingface_rank", DS_ACCELERATOR="cpu", ORDER=order) as started:
        yield started


def visible(folder: Path) -> list[Path]:
    """The checkpoints that anybody sees who looks for directories of such names."""
    return sorted(path for path in folder.glob("**/checkpoint[-_]*") if ".checkpointd" not in path.parts and path.is_dir())


def whole(checkpoint: Path) -> bool:
    """Whether everything is there that the library and the engine write, on both ranks."""
    names = {path.name for path in checkpoint.iterdir()}
    if checkpoint.name.startswith("checkpoint_"):
        needed, tag = {"latest", "random_states_0.pkl"}, "pytorch_model"  # on a CPU it takes each rank for the first
    else:
        tag = checkpoint.name.replace("checkpoint-", "global_step")
        needed = {"latest", "rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "trainer_state.json"}
        assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(checkpoint.name[11:])
    files = {path.name for path in (checkpoint / tag).iterdir()}
    return needed <= names and len([name for name in files if name.endswith("_states.pt")]) == 3


def left_over(folder: Path) -> list[Path]:
    return [path for root in folder.glob("**/.checkpointd/unfinished") for path in root.iterdir()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each round is a test, so that its time is limited by itself."""
    if "round_number" in metafunc.fixturenames:
        metafunc.parametrize("round_number", range(metafunc.config.getoption("--trainer-rounds")))


def test_a_job_that_is_killed_in_the_middle_of_a_save_goes_on(
    rank_forker: RankForker, order: str, tmp_path: Path, round_number: int
) -> None:
    point = POINTS[(round_number + len(ORDERS) - 1 - ORDERS.index(order)) % len(POINTS)]
    train = "accelerate" if order == "accelerate" else "train"
    with Job(folder=tmp_path, rank_forker=rank_forker) as job:
        dying = job.ranks[0 if point in ("showing", "shown") else round_number % 2]
        dying.do("die", point=point, step=4)
        job.tell(train, folder=str(tmp_path), last=8)
        with pytest.raises(RuntimeError, match="has ended with -9"):
            dying.answer()
    found = visible(tmp_path)
    numbers = [int(re.split("[-_]", path.name)[1]) for path in found]
    first, second = (0, 1) if order == "accelerate" else (2, 4)
    assert numbers in ([[first]] if point != "shown" else [[first, second]]), f"{point}: {found}"
    assert all(map(whole, found)), f"{point}: {found}"
    with Job(folder=tmp_path, rank_forker=rank_forker) as job:
        [one, other] = job.all(train, folder=str(tmp_path), last=6, resume=True)
    assert one == other
    # What was committed appears at the start, at which the Trainer has chosen already.
    went_on = point == "shown" or (point == "showing" and order == "accelerate")
    assert (one["from"], one["step"]) == (4 if went_on else 2, 6), point
    found = visible(tmp_path)
    assert one.get("elsewhere", "pytorch_model") == "pytorch_model", "a directory below one that was not there"
    assert one["newest"] == found[-1].name == ("checkpoint_2" if order == "accelerate" else "checkpoint-6")
    assert len(found) == 2, f"{point}: the older ones have gone: {found}"
    assert all(map(whole, found))
    assert not left_over(tmp_path)


@pytest.mark.root
@pytest.mark.parametrize("order", ["after"], indirect=True)
def test_a_full_disk_fails_saves_and_nothing_else(rank_forker: RankForker, tmp_path: Path) -> None:
    """Of a save that fails, in the engine's files or in the library's, nothing stays; so there is room for save_model()."""
    with mounts.tmpfs(16 * MIB) as small, Job(folder=tmp_path, rank_forker=rank_forker) as job:
        run = small / "run"
        for said in job.all(
            "train_on_a_full_disk", folder=str(run), ballast=str(small / "ballast"), room=700 * KIB, less=100 * KIB
        ):
            assert said["phases"][0] == "committed"
            assert set(said["phases"][1:]) <= {"aborted", "failed"}
            assert said["step"] == 8
        wait_until(lambda: not left_over(run), "what failed has gone", limit_s=LIMIT_S)
        assert [path.name for path in visible(run)] == ["checkpoint-2"]
        assert (run / "model.safetensors").stat().st_size > 300 * KIB
