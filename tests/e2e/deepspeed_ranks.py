"""Two ranks of a job that saves DeepSpeed engines in DeepSpeed's own files, and does what users do wrong.

    python deepspeed_ranks.py FOLDER

Every rank notes what is wrong in each case: see `rank_cases.py`.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    DeadlineError,
    StateError,
    StoreError,
    UnreadableError,
    UsageError,
)
from checkpointd_client import Checkpointer
from checkpointd_client.core import Core
from checkpointd_client.integrations.deepspeed import Adapter, attach
from checkpointd_client.integrations.directories.targets import SaveTarget
from tests.e2e.deepspeed_engines import Findings, Kind, make, train
from tests.e2e.deepspeed_parallel import PARALLEL
from tests.e2e.forked_ranks import forked, join_job
from tests.job_elsewhere import live_job
from tests.logged_roots import log_state

KINDS = (Kind(0), Kind(0, "bfloat16"), Kind(1), Kind(2, "bfloat16"), Kind(3), Kind(3, "bfloat16"))
LIMIT_S = 300.0
SHORT_S = 2.0


class Unlucky:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("no luck")


class Rank(Findings):
    @contextmanager
    def raises(self, kind: type[Exception], words: str, what: str) -> Iterator[None]:
        try:
            yield
        except kind as error:
            self.check(words in str(error), f"{what}: {error}")
        except Exception as error:
            self.wrong.append(f"{what}: {error!r}")
        else:
            self.wrong.append(f"{what}: nothing was raised")

    # --- what is stored ----------------------------------------------------------------------------------------

    def saves_as_deepspeed_does_and_resumes(self, kind: Kind) -> None:
        """The files are those that DeepSpeed itself writes, and training goes on as if it had never stopped."""
        stock, ours = self.folder / kind.name / "stock", self.folder / kind.name / "ours"
        engine = make(kind)
        train(engine, 0, 3)
        state = {"epoch": 3, "best": {"loss": torch.tensor(0.5)}, "where": ours}
        engine.save_checkpoint(str(stock), client_state=dict(state))
        plug = attach(engine)
        self.check(engine.save_checkpoint(str(ours), client_state=state) is True, "save_checkpoint returns True")
        losses = train(engine, 3, 6)
        handle = engine.checkpoint_handle()
        handle.wait(LIMIT_S)
        self.check(handle.phase == "committed", f"{kind.name}: {handle}")
        self.check((ours / "latest").read_text() == (stock / "latest").read_text(), f"{kind.name}: latest")
        self.same_files(stock / "global_step3", ours / "global_step3", kind.name)
        plug.close()
        engine.destroy()
        again = make(kind, seed=1)
        attach(again)
        path, client = again.load_checkpoint(str(ours))
        self.check(
            path is not None and client["epoch"] == 3 and client["where"] == ours, f"{kind.name}: loaded {path} {client}"
        )
        self.check(train(again, 3, 6) == losses, f"{kind.name}: the losses after the resume differ")
        again.destroy()

    def same_files(self, stock: Path, ours: Path, name: str) -> None:
        if dist.get_rank():
            return
        names = sorted(path.name for path in stock.iterdir())
        self.check(names == sorted(path.name for path in ours.iterdir()), f"{name}: other files than DeepSpeed's")
        for file in names:
            one, two = (torch.load(folder / file, weights_only=False) for folder in (stock, ours))
            self.check(same(one, two), f"{name}: {file} holds something else")
            self.check((stock / file).stat().st_size == (ours / file).stat().st_size, f"{name}: {file} has another size")
            torch.load(ours / file, weights_only=False, mmap=True)
            with zipfile.ZipFile(ours / file) as archive:
                self.check(archive.testzip() is None, f"{name}: {file} has wrong sums")

    def saves_what_each_rank_has_alone(self, what: str) -> None:
        """A pipeline and a mixture of experts, in this layout; the other one says why it does not take them."""
        make_one, train_one = PARALLEL[what]
        engine, root = make_one(0), str(self.folder / what)
        with self.raises(UsageError, what, f"{what}, in the other layout"):
            attach(engine, layout="checkpointd")
        train_one(engine, 0, 2)
        plug = attach(engine)
        engine.save_checkpoint(root, client_state={"epoch": 3})
        seen: list[object] = []
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
        losses = train_one(engine, 2, 4)
        hook.remove()
        self.check(len(seen) == 2, f"{what}: a snapshot is to be whole before a step, and {len(seen)} of 2 steps were seen")
        plug.close()
        engine.destroy()
        again = make_one(1)
        attach(again)
        path, client = again.load_checkpoint(root)
        self.check(path is not None and client["epoch"] == 3, f"{what}: loaded {path} {client}")
        found = train_one(again, 2, 4)
        self.check(found == losses, f"{what}: losses {found}, and without a stop {losses}")
        again.destroy()

    # --- what goes wrong ---------------------------------------------------------------------------------------

    def does_what_users_do(self) -> None:
        root = self.folder / "wrong"
        engine = make(Kind(1))
        train(engine, 0, 1)
        with detaching(attach(engine, commit_timeout_s=LIMIT_S)):
            self.tags_that_differ(engine, root)
            self.what_cannot_be_pickled_on_one_rank(engine, root)
            self.saving_every_step_and_16_bit_in_between(engine, root)
        self.other_directories(engine, self.folder / "many")
        self.a_disk_that_refuses_rank_0(engine, self.folder / "refusing")
        self.damaged_ones(engine, self.folder / "damaged")
        self.what_one_rank_does_not_see_or_somebody_removed(engine, self.folder / "removed")
        self.two_engines(engine, self.folder / "two")
        self.one_root_for_several_directories(engine, self.folder / "several")
        with detaching(attach(make(Kind(1)), commit_timeout_s=LIMIT_S)) as plug:
            self.one_rank_alone(plug, self.folder / "alone")

    def tags_that_differ(self, engine: Any, root: Path) -> None:
        """DeepSpeed's tag_validation: by default all is saved under the tag of rank 0, and not in pieces under several."""
        engine.save_checkpoint(str(root / "tags"), tag=f"mine-{dist.get_rank()}")
        engine.checkpoint_handle().wait(LIMIT_S)
        self.check(sorted(path.name for path in (root / "tags").glob("mine*")) == ["mine-0"], "directories of tags that differ")
        self.check(engine.load_checkpoint(str(root / "tags"))[0] is not None, "what was saved under tags that differ")
        settings = engine._config.checkpoint_config
        settings["tag_validation"], before = "FAIL", settings["tag_validation"]
        for kind in (UsageError, AssertionError):
            with self.raises(kind, "rank 1", "tags that differ"):
                engine.save_checkpoint(str(root), tag=f"other-{dist.get_rank()}")
        settings["tag_validation"] = before
        self.check(not list(root.glob("other*")), "a directory for tags that differ")

    def what_cannot_be_pickled_on_one_rank(self, engine: Any, root: Path) -> None:
        for unlucky in range(2):  # also rank 1, whose client state is in no file
            is_other = dist.get_rank() != unlucky
            with nullcontext() if is_other else self.raises(StateError, "'charm'", "unpicklable"):
                engine.save_checkpoint(str(root), tag="unlucky", client_state={"charm": None if is_other else Unlucky()})
            handle = engine.checkpoint_handle()
            path, _ = engine.load_checkpoint(str(root / "tags"))  # while the other rank has not heard yet that the save failed
            self.check(path is not None, "nothing is loaded right after a save that failed")
            if is_other:
                with self.raises(StateError, "no luck", "unpicklable"):
                    handle.wait(LIMIT_S)
        self.check(not (root / "unlucky").exists() and not (root / "latest").exists(), "something of the aborted save is there")

    def saving_every_step_and_16_bit_in_between(self, engine: Any, root: Path) -> None:
        for step in range(2, 6):
            train(engine, step - 1, step)
            engine.save_checkpoint(str(root))
            if step == 4:
                engine.save_16bit_model(str(root), "weights.bin")
        path, _ = engine.load_checkpoint(str(root))  # right after the save
        self.check(path is not None and "global_step5" in path, f"loaded {path} right after saving global_step5")
        self.check((root / "weights.bin").is_file(), "save_16bit_model wrote nothing")

    def other_directories(self, engine: Any, root: Path) -> None:
        """As the Trainer of transformers does, which removes old ones itself."""
        plug = attach(engine, root)
        for step in (10, 20, 30):
            engine.save_checkpoint(str(root / f"checkpoint-{step}"))
            plug.wait(LIMIT_S)
            dist.barrier()
            if dist.get_rank() == 0 and step == 20:
                shutil.rmtree(root / "checkpoint-10")
            dist.barrier()
        with self.raises(UsageError, "does not lie in", "a save_dir outside"):
            engine.save_checkpoint(str(self.folder / "elsewhere"))
        plug.detach()
        dist.barrier()  # rank 0 has tidied up
        kept = {path.parts[-3] for path in (root / ".checkpointd").glob("*/*/*.file")}
        self.check(kept == {"checkpoint-20--global_step5", "checkpoint-30--global_step5"}, f"objects of {kept} are left")

    def damaged_ones(self, engine: Any, root: Path) -> None:
        """The newest whole one is loaded, by both ranks; and DeepSpeed's own are loaded as ever."""
        engine.save_checkpoint(str(root / "stock"), tag="theirs")
        plug = attach(engine)
        self.check(engine.load_checkpoint(str(root / "stock"))[0] is not None, "what DeepSpeed itself saved is not loaded")
        for step in (1, 2):
            engine.save_checkpoint(str(root), tag=f"step{step}")
        plug.wait(LIMIT_S)
        dist.barrier()
        if dist.get_rank() == 0:
            with (root / "step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").open("r+b") as file:
                file.seek(-2000, os.SEEK_END)
                file.write(b"no")
        dist.barrier()
        path, _ = engine.load_checkpoint(str(root))
        self.check(path is not None and "step1" in path, f"the newest is damaged, and {path} was loaded")
        with self.raises(DamagedError, "step2 is damaged", "a damaged one by its name"):
            engine.load_checkpoint(str(root), "step2")
        plug.detach()
        engine.save_checkpoint(str(root), tag="theirs")
        with detaching(attach(engine)):
            path, _ = engine.load_checkpoint(str(root))
            self.check(path is not None and "theirs" in path, f"DeepSpeed has saved since, and {path} was loaded")
        with detaching(attach(engine, layout="checkpointd")):
            for directory in (root, root / "stock"):
                path, _ = engine.load_checkpoint(str(directory))
                self.check(path is not None and "theirs" in path, f"the other layout loads {path} of {directory}")
            with self.raises(UsageError, "layout='deepspeed'", "the other layout in the same directory"):
                engine.save_checkpoint(str(root))
            self.check(engine.load_checkpoint(str(root / "nothing")) == (None, None), "there is nothing to load")

    def a_disk_that_refuses_rank_0(self, engine: Any, root: Path) -> None:
        """What rank 0 does alone fails on it, while the others wait in a barrier of DeepSpeed's: nobody may hang there."""

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with detaching(attach(engine, root)):
            with patch.object(deepspeed_engine, "copyfile", full):
                engine.save_checkpoint(str(root), tag="without-scripts")
            engine.checkpoint_handle().wait(LIMIT_S)
            if dist.get_rank() == 0:
                (root / "file").touch()
            dist.barrier()
            engine.save_checkpoint(str(root / "file" / "below"))
            with self.raises(CheckpointdError, "cannot be made", "a save_dir that cannot be made"):
                engine.checkpoint_handle().wait(LIMIT_S)

    def what_one_rank_does_not_see_or_somebody_removed(self, engine: Any, root: Path) -> None:
        with detaching(attach(engine)) as plug:
            for tag in ("one", "two", "three"):
                engine.save_checkpoint(str(root), tag=tag)
            plug.wait(LIMIT_S)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(root / "three")
            dist.barrier()
            path, _ = engine.load_checkpoint(str(root))
            self.check(path is not None and "two" in path, f"three was removed, and {path} was loaded")
            known = Core.checkpoints

            def oldest(core: Core) -> list[Any]:
                return [found for found in known(core) if found.tag == "one"]

            for listed, what in ((oldest, "sees only the oldest"), (failing, "is blind")):
                behind = patch.object(Core, "checkpoints", listed) if dist.get_rank() else nullcontext()
                with self.raises(UnreadableError, "no older one is loaded", f"rank 1 {what}"), behind:
                    engine.load_checkpoint(str(root))

    def two_engines(self, engine: Any, root: Path) -> None:
        """One saves and another loads, in one process and at once; and files are there when a synchronous save returns."""
        plug = attach(engine, synchronous=True)
        engine.save_checkpoint(str(root), tag="there")
        self.check((root / "latest").read_text() == "there", "a synchronous save has returned, and latest is not there")
        other = make(Kind(1), seed=5)
        with detaching(attach(other)):
            engine.save_checkpoint(str(root), tag="newer")
            path, _ = other.load_checkpoint(str(root))
            self.check(path is not None and "newer" in path, f"another engine loaded {path}")
        third = make(Kind(1), seed=6)
        with (
            detaching(attach(third, compression="none")),
            self.raises(UsageError, "give both the same options", "other options"),
        ):
            third.save_checkpoint(str(root))
        plug.detach()

    def one_root_for_several_directories(self, engine: Any, root: Path) -> None:
        """Each has its own checkpoints, in both layouts."""
        places = [("a--b", "c"), ("a", "b--c"), ("a/b", "c"), ("", "a--b--c"), ("a-", "b"), ("a", "-b")]
        tags = {SaveTarget.of(str(root / folder), tag, str(root)).tag for folder, tag in places}
        self.check(len(tags) == len(places), f"directories share the tags {tags}")
        with detaching(attach(engine, root, layout="checkpointd")):
            self.check(engine.load_checkpoint(str(root / "run")) == (None, None), "something is loaded of an empty directory")
            saves = ("run", "one", True), ("run", "best", False), ("run/below", "other", True), ("run--x", "dashed", True)
            for folder, tag, save_latest in saves:
                engine.save_checkpoint(str(root / folder), tag=tag, save_latest=save_latest)
                engine.checkpoint_handle().wait(LIMIT_S)
            for folder, tag in ("run", "one"), ("run/below", "other"), ("run--x", "dashed"):
                path, _ = engine.load_checkpoint(str(root / folder))
                self.check(path is not None and tag in path, f"of {folder}, {path} is loaded")
            self.check(engine.load_checkpoint(str(root)) == (None, None), "what lies in directories below is loaded")
            engine.save_checkpoint(str(root), tag=0)
            engine.checkpoint_handle().wait(LIMIT_S)
            self.check(engine.load_checkpoint(str(root), 0)[0] == str(root / "0"), "a tag that is the number 0")

    def starts_from_the_checkpoint_of_a_living_job(self, layout: str) -> None:
        """Which is read on all ranks, and left alone."""
        kind, root = Kind(2), self.folder / "living" / layout
        store = root / ".checkpointd" if layout == "deepspeed" else root
        engine = make(kind)
        train(engine, 0, 2)
        plug = attach(engine, layout=layout)
        engine.save_checkpoint(str(root))
        losses = train(engine, 2, 4)
        plug.close()
        engine.destroy()
        again = make(kind, seed=1)
        attach(again, layout=layout)
        with live_job(store, "other") if dist.get_rank() == 0 else nullcontext():
            dist.barrier()
            path, _ = again.load_checkpoint(str(root))
            self.check(path is not None and "global_step2" in path, f"{layout}, of a living job: loaded {path}")
            self.check(train(again, 2, 4) == losses, f"{layout}: the losses after a start from a living job differ")
            newest = log_state(store).start
            self.check(newest == 2, f"{layout}: a load has begun start {newest}")
            dist.barrier()
        again.destroy()

    def one_rank_alone(self, plug: Adapter, root: Path) -> None:
        engine = plug.engine
        engine.save_checkpoint(str(root))  # both ranks: the Checkpointer is there
        dist.barrier()
        if dist.get_rank() == 0:
            short = patch.object(plug, "_timeout_s", SHORT_S)
            with short, self.raises(DeadlineError, "rank 1 did not answer", "rank 0 alone"):
                engine.save_checkpoint(str(root), tag="alone")
        dist.barrier()
        engine.save_checkpoint(str(root), tag="together")
        engine.checkpoint_handle().wait(LIMIT_S)
        self.check((root / "latest").read_text() == "together", "the save after a lonely one")


def failing(_: Checkpointer) -> list[Any]:
    raise StoreError("the storage does not answer")


@contextmanager
def detaching(plug: Adapter) -> Iterator[Adapter]:
    yield plug
    with suppress(CheckpointdError):  # one of those that had to
        plug.close()
    plug.detach()


def same(one: Any, two: Any) -> bool:
    """Whether two loaded contents are equal bit for bit, whatever the objects in them are."""
    if isinstance(one, torch.Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride()
        # Bits: what DeepSpeed pads with may be NaN.
        return alike and torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)))
    if isinstance(one, dict):
        return type(one) is type(two) and list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and (one == two or vars(one) == vars(two))


def run(folder: Path, number: int) -> None:
    join_job(folder, number, 2)
    rank = Rank(folder)
    for kind in KINDS:
        with rank.case(f"saves_as_deepspeed_does_and_resumes: {kind.name}"):
            rank.saves_as_deepspeed_does_and_resumes(kind)
    with rank.case("does_what_users_do"):
        rank.does_what_users_do()
    for layout in ("deepspeed", "checkpointd"):
        with rank.case(f"starts_from_the_checkpoint_of_a_living_job: {layout}"):
            rank.starts_from_the_checkpoint_of_a_living_job(layout)
    for what in PARALLEL:
        with rank.case(f"saves_what_each_rank_has_alone: {what}"):
            rank.saves_what_each_rank_has_alone(what)
    rank.finish()


if __name__ == "__main__":
    forked(Path(sys.argv[1]), 2, run)
