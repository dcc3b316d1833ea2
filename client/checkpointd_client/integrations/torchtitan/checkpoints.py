"""CheckpointdManager: torchtitan's CheckpointManager, whose checkpoints checkpointd writes, commits and reads.

torchtitan's own class still decides when to save and what belongs to the state, and knows Hugging Face's formats. This one
replaces how a state is saved and loaded.

Invariants
  TITAN-1  Rank 0 chooses the checkpoint to load, among the committed ones, and all ranks load that one.
  TITAN-2  With `load_only`, and for `initial_load_path`, the job only reads: it has no start there and disturbs no other job.
  TITAN-3  A failed save ends the training only if it is the last one, or if `async_mode` is "disabled".
  TITAN-4  A checkpoint of torchtitan's own manager in the folder is loaded if its step is higher than that of our newest one.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger

from checkpointd.bucket_urls import is_bucket_url
from checkpointd.errors import CheckpointdError, UnreadableError
from checkpointd_client.core import Core
from checkpointd_client.integrations.torchtitan.step_folders import (
    OtherStep,
    is_root,
    joined,
    other_steps,
    split,
    stale,
    step_in,
)
from checkpointd_client.integrations.torchtitan.targets import TitanTargets
from checkpointd_client.loaded import Loaded
from checkpointd_client.onlooker import Onlooker
from checkpointd_client.ranks.board import COORDINATOR, find_ranks
from checkpointd_client.ranks.convening import convene
from checkpointd_client.settings import Options
from checkpointd_client.staging.stager import StagingMode

DOING = "loading a checkpoint of torchtitan"
STAGING: dict[str, StagingMode] = {"disabled": "eager", "async": "eager", "async_with_pinned_mem": "lazy"}
T = TypeVar("T")


class CheckpointdManager(CheckpointManager):
    """A CheckpointManager: set `checkpoint=CheckpointdManager.Config(...)` in torchtitan's Trainer.Config.

    Raises the errors of torchtitan's CheckpointManager and of Checkpointer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of torchtitan's CheckpointManager, and those of Checkpointer that matter here. `folder` is the root."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async_with_pinned_mem"
        """When save() returns. async_with_pinned_mem: at once; the state is copied during the next forward and backward pass.
        async: after the copy. disabled: after the commit."""

        sidecar: str | None = None
        """The socket of this node's `checkpointd serve`. It persists the snapshots and outlives this process."""

        spool: str | None = None
        """A directory on this node's own disk. Snapshots become durable there first, and go to the folder from there."""

        compression: Literal["auto", "none", "zstd", "planes"] = "auto"
        """How the bytes of the state are encoded."""

        full_every: int | None = None
        """10 stores one checkpoint in ten in full, and those between as differences from it. None stores all in full."""

        max_overhead: float | None = 0.03
        """How much longer steps may take while a save is in flight: 0.03 is 3 %. None saves at full speed."""

        commit_timeout_s: float = 600.0
        """How many seconds the ranks wait for each other before they abort a save."""

        job: str | None = None
        """The job's name. A start with the same name takes the folder over. None: from CHECKPOINTD_JOB, torchrun or Slurm."""

        take_over: bool = False
        """Begin even if another job is alive in the folder; every save of that job then fails."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            options_of(self)  # refuses bad values

    _timeout_s = 600.0

    def __init__(self, config: Config, **parts: Any) -> None:
        self._config, self._timeout_s = config, config.commit_timeout_s
        self._roots: dict[str, Core] = {}
        self._others: list[OtherStep] = []
        self._committed_before = 0
        # For its own asynchronous modes, torchtitan would make a process group.
        super().__init__(dataclasses.replace(config, async_mode="disabled"), **parts)
        self.async_mode = AsyncMode(config.async_mode)
        if self.enable:
            self.folder, _ = split(self._create_checkpoint_id(0))  # written as in every other call

    # --- saving ------------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        sl.add_step_tag("checkpoint_save")
        began = time.monotonic()
        with sl.log_trace_span("checkpoint_save"), torch.no_grad():
            if last_step:
                self._save_last_step(curr_step)
            else:
                states = self._flattened_model_states_sd()
                self.save_future = self.dcp_save(states, self._create_checkpoint_id(curr_step), self.async_mode)
        self._purge_stale_checkpoints()
        done = "committed" if self.save_future is None or last_step else "begun"
        logger.info(f"The checkpoint of step {curr_step} was {done} in {time.monotonic() - began:.2f} seconds.")
        return True

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | None:
        """Save `state_dict` as the checkpoint at the path `checkpoint_id`, or as torchtitan does in Hugging Face's format.

        Returns a Future that is done when the save has ended, committed or not. With `async_mode` "disabled", it returns None
        once the checkpoint has committed, and raises the error if it has not.
        """
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, AsyncMode.DISABLED, enable_garbage_collection, to_hf=True)
            return None
        folder, tag = split(checkpoint_id)
        handle = self._begun(folder).save(step_in(tag), state_dict, tag=tag)
        if async_mode == AsyncMode.DISABLED:
            handle.wait()
            return None
        ended: Future[None] = Future()
        handle.when_done(lambda: ended.set_result(None))
        return ended

    def _maybe_wait_for_staging(self) -> None:
        for root in self._roots.values():
            root.fence()

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None  # the caller has looked
        self.save_future.result()
        self.save_future = None

    def _purge_stale_checkpoints(self) -> None:
        """Queue checkpoints of torchtitan's own manager that `keep_latest_k` does not keep. The retention removes ours."""
        if not (self._others and self._should_purge()):
            return
        ours = self._committed_before + self._begun(self.folder).status().saves_committed
        for other in stale(self._others, ours, self.keep_latest_k):
            self.purge_queue.put(other.path)
            self._others.remove(other)

    # --- loading -----------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        if not self._begins_to_load(self.folder) and not self._is_root(self.folder):
            return self._load_other(step)
        with sl.log_trace_span("checkpoint_load"), torch.no_grad(), self._to_load(self.folder) as opened:
            tag, other = self._chosen(opened, self.folder, step)
            if other is None and (tag is not None or step == -1):
                states = self._states_to_load(model_only=False)
                loaded = self._filled(opened, states, tag)
                if loaded is not None:
                    logger.info(f"Loaded the checkpoint {loaded.tag} from {self.folder}.")
                    return True
            found = self._load_other(step if other is None else other)
            opened.take_up()
            return found

    def _load_other(self, step: int) -> bool:
        """Load a checkpoint of torchtitan's own manager in the folder, or the one that the `initial_load_*` options name."""
        initial, folder = self.initial_load_path or "", self.folder
        if is_bucket_url(folder) and step != -1:
            raise FileNotFoundError(f"--checkpoint.load_step={step} not found in {folder}")
        if is_bucket_url(initial) and step == -1 and self._find_load_step() == -1:
            states = self._states_to_load(self.initial_load_model_only)
            self.dcp_load(states, initial, from_hf=False, from_quantized=False)
            logger.info(f"Loaded the checkpoint at {initial}.")
            return True
        # torchtitan would look into a bucket through fsspec, which may be unable to reach it.
        self.folder = "" if is_bucket_url(folder) else folder
        try:
            return bool(super()._load(step))
        finally:
            self.folder = folder

    def _chosen(self, opened: Core | Onlooker, folder: str, step: int) -> tuple[str | None, int | None]:
        """What rank 0 finds in `folder`: the tag of our checkpoint of `step`, or the step of one of torchtitan's own. Neither
        if there is none. For step -1, None as the tag means our newest checkpoint.
        """
        tag, other, fault = self._of_rank_0(opened.meet, folder, lambda: self._look(opened, folder, step))
        if fault:
            raise ValueError(fault)
        return tag, other

    def _look(self, opened: Core | Onlooker, folder: str, step: int) -> tuple[str | None, int | None, str]:
        tags = [checkpoint.tag for checkpoint in opened.checkpoints()]
        others = other_steps(folder, tags)
        self._others, self._committed_before = [other for other in others if other.kind == "dcp"], len(tags)
        if step != -1:
            tag = f"step-{step}"
            return (tag, None, "") if tag in tags else (None, next((one.step for one in others if one.step == step), None), "")
        newest = others[-1] if others else None
        if newest is None or (tags and newest.step <= step_in(tags[0])):
            return None, None, ""
        fault = (
            f"{newest.path} holds the model alone, in Hugging Face's format, as the last save with last_save_in_hf does. The "
            "run cannot go on from it. Load an earlier step (--checkpoint.load_step), or begin a new run from it: with another "
            "--checkpoint.folder, this one as --checkpoint.initial_load_path, and --checkpoint.initial_load_in_hf"
        )
        return (None, newest.step, "") if newest.kind == "dcp" else (None, None, fault)

    def _find_load_step(self, folder: str = "") -> int:
        """The step that a load of the newest checkpoint finds; -1 if there is none."""
        folder = folder or self.folder
        if not self._is_root(folder):
            return int(super()._find_load_step(folder))
        with self._to_load(folder) as opened:
            _, other = self._chosen(opened, folder, -1)
            newest = self._of_rank_0(opened.meet, folder, lambda: [step_in(one.tag) for one in opened.checkpoints()][:1])
            return other if other is not None else newest[0] if newest else -1

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        return joined(folder or self.folder, f"step-{step}")

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load the checkpoint at the path `checkpoint_id` into `state_dict`, from checkpointd or from torchtitan's formats."""
        folder, tag = split(checkpoint_id)
        if not from_hf and self._is_root(folder):
            with self._to_load(folder) as opened:
                if self._of_rank_0(opened.meet, folder, lambda: not is_others(opened, folder, tag)):
                    self._filled(opened, state_dict, tag)
                    return
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _filled(self, opened: Core | Onlooker, states: dict[str, Any], tag: str | None) -> Loaded | None:
        """Load our checkpoint `tag`, or the newest one, into `states`: the model's tensors and the other parts."""
        parts = {name: part for name, part in states.items() if name in self.states}
        model = {name: tensor for name, tensor in states.items() if name not in parts}
        targets = TitanTargets(model, parts or None)
        loaded = opened.load(targets, tag, cast=True)
        if loaded is not None:
            filled = targets.finish(loaded)
            if filled:
                self.states[MODEL].load_state_dict(filled)
        return loaded

    # --- roots -------------------------------------------------------------------------------------------------

    def _begun(self, folder: str) -> Core:
        """The job's own part at `folder`."""
        if folder not in self._roots:
            self._roots[folder] = Core(folder, self._options(folder))
        return self._roots[folder]

    def _options(self, folder: str) -> Options:
        return options_of(self._config)

    def _begins_to_load(self, folder: str) -> bool:
        """Whether the job begins at `folder` when it loads from there; otherwise it only reads."""
        return folder == self.folder and not self.load_only

    @contextmanager
    def _to_load(self, folder: str) -> Iterator[Core | Onlooker]:
        if folder in self._roots or self._begins_to_load(folder):
            yield self._begun(folder)
            return
        nonce = self._of_rank_0(self._convene, folder, lambda: secrets.token_hex(16))
        with Onlooker(folder, nonce, timeout_s=self._timeout_s) as onlooker:
            yield onlooker

    def _is_root(self, folder: str) -> bool:
        return self._of_rank_0(self._convene, folder, lambda: is_root(folder))

    def _convene(self, said: str, doing: str) -> dict[int, str]:
        return convene(said, doing, self._timeout_s)

    def _of_rank_0(self, meet: Callable[[str, str], dict[int, str]], folder: str, ask: Callable[[], T]) -> T:
        """The answer of rank 0, on every rank. UnreadableError on every rank if rank 0 cannot look at `folder`."""
        answer, fault = None, None
        if find_ranks().rank == COORDINATOR:
            try:
                answer = ask()
            except (CheckpointdError, OSError) as error:
                fault = str(error)
        answer, fault = json.loads(meet(json.dumps([answer, fault]), DOING)[COORDINATOR])
        if fault is not None:
            raise UnreadableError(f"rank 0 cannot look at {folder}: {fault}")
        return answer  # type: ignore[no-any-return]

    def __del__(self) -> None:
        """Do nothing, unlike torchtitan's: the garbage collector must not wait for saves. The end of the process does."""

    def _close(self) -> None:
        super()._close()
        for folder in list(self._roots):
            self._end(folder)

    def _end(self, folder: str, *, is_over: bool = True) -> None:
        """Wait for the saves in flight at `folder`, and end there. `is_over`: whether the training ends, too (TITAN-3)."""
        is_failing = sys.exc_info()[0] is not None
        try:
            self._roots.pop(folder).close(ends_well=not is_failing)
        except CheckpointdError as error:
            if is_over and not is_failing:
                raise
            logger.error(f"The last save in {folder} failed: {error}")


def is_others(opened: Core | Onlooker, folder: str, tag: str) -> bool:
    """Whether only torchtitan's own manager has a checkpoint of this name in `folder`."""
    ours = [checkpoint.tag for checkpoint in opened.checkpoints()]
    return tag in (split(other.path)[1] for other in other_steps(folder, ours))


def options_of(config: Any) -> Options:
    """The options of the Checkpointer. UsageError for bad values."""
    return Options(
        compression=config.compression,
        staging=STAGING[config.async_mode],
        commit_timeout_s=config.commit_timeout_s,
        sidecar=config.sidecar,
        full_every=config.full_every,
        retention=config.keep_latest_k or None,
        on_no_progress="ignore",
        job=config.job,
        take_over=config.take_over,
        max_overhead=config.max_overhead,
        spool=config.spool,
    )
