"""Reads a checkpoint outside the job that saves it: in an evaluation script, a notebook, or a server.

Invariants
  OPEN-1  A reader writes, locks and announces nothing at the root, talks to no process, and waits for no rank. It needs only
      permission to read, works on a read-only mount, and never disturbs a job at the root.
  OPEN-2  All values from one reader come from one attempt, and every byte is verified before a call returns it.
"""

from __future__ import annotations

import logging
import os
import stat
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.distributed import ProcessGroup

from checkpointd import arguments
from checkpointd.arguments import shown
from checkpointd.bucket_urls import directory_of
from checkpointd.config import ABSENCE_S, PINNED_BYTES, LoadConfig, PersistConfig, Ranks
from checkpointd.errors import (
    CheckpointdError,
    ClosedError,
    DamagedError,
    MismatchError,
    NotFoundError,
    PartlyLoadedError,
    UnreadableError,
    UsageError,
)
from checkpointd.export.selection import select_all
from checkpointd.layout.keys import LATEST, STEP_MAX, AttemptId
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.other_formats import of_others
from checkpointd.phrases import listed
from checkpointd.pipeline.identity import seconds_of
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.choice import CheckpointFinder
from checkpointd.pipeline.read.load import read_boxes
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd.store import open_store
from checkpointd.system_errors import in_words
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from checkpointd_client.export.state_dict import StateDict
from checkpointd_client.lifetime import check_no_tag
from checkpointd_client.loaded import Loaded
from checkpointd_client.loader import LOOK_S, loaded_of, what_is_awaited
from checkpointd_client.ranks.board import check_group, group_ranks
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.content import RankContent, part_of, parts_of
from checkpointd_client.restore.plan import LoadOptions, Restoration, prepare
from checkpointd_client.restore.store_source import StoredSource, prepared
from checkpointd_client.settings import check_load

log = logging.getLogger("checkpointd")
T = TypeVar("T")
TIMEOUT_S = 120.0


def open_checkpoint(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    step: int | None = None,
    attempt: str | None = None,
    timeout_s: float = TIMEOUT_S,
    absence_s: float = ABSENCE_S,
    pickle_client_state: bool = False,
    pinned_bytes: int = PINNED_BYTES,
    tensor_classes: Iterable[type] = (),
    process_group: ProcessGroup | None = None,
) -> OpenCheckpoint:
    """Open the newest whole checkpoint below `root`, or `tag`, for reading. A job that saves there is not disturbed.

    It writes nothing and needs no process group; in one, each rank opens it on its own. Use it in a `with`, or close it. If the
    newest checkpoint is damaged, the log says so and the newest whole one is opened; a named one raises DamagedError.

    `tag`: which checkpoint; "latest" means the newest, and no older one if it is damaged.
    `step`: the newest checkpoint of this step.
    `attempt`: which save of that tag, if it was saved more than once.
    `timeout_s`: how long to try again if the storage does not answer or fails.
    `absence_s`: how long to look for a file that must be there before it counts as lost.
    `pickle_client_state`: load values that were stored as pickles; their code runs. Otherwise they are refused by name.
    `pinned_bytes`: the most host memory that one load to devices pins; 0 pins none.
    `tensor_classes`: your own classes of tensors that a load may make, as Checkpointer has them.
    `process_group`: the ranks that load, if not all ranks of the job do. They get the values of the ranks of that group.

    Raises NotFoundError if there is no checkpoint, no such tag or no root, UsageError, DamagedError, StoreError.
    """
    return OpenCheckpoint(
        root,
        tag,
        step=step,
        attempt=attempt,
        timeout_s=timeout_s,
        absence_s=absence_s,
        pickle_client_state=pickle_client_state,
        pinned_bytes=pinned_bytes,
        tensor_classes=tensor_classes,
        process_group=process_group,
    )


class OpenCheckpoint:
    """One checkpoint, open for reading; `open_checkpoint` makes it.

    If a job removes the checkpoint before you have read anything of it (a property, a tensor, a load), this object switches to
    the newest one, or to the same tag saved again. After that it never switches: NotFoundError says that it was removed.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        tag: str | None,
        *,
        step: int | None = None,
        attempt: str | None,
        timeout_s: float,
        absence_s: float,
        pickle_client_state: bool,
        pinned_bytes: int,
        tensor_classes: Iterable[type] = (),
        process_group: ProcessGroup | None = None,
    ) -> None:
        arguments.path("root", root)
        arguments.seconds("timeout_s", timeout_s, most=arguments.TIMEOUT_S_MAX, zero=True)
        arguments.seconds("absence_s", absence_s, most=arguments.TIMEOUT_S_MAX, zero=True)
        arguments.flag("pickle_client_state", pickle_client_state)
        self._classes = TensorClasses.of(tensor_classes)
        self._group = process_group
        if process_group is not None:
            check_group(process_group)
        self._store = open_store(root, read_only=True)
        if directory_of(self._store.url) is not None:
            _check_directory(self._store.url)
            check_no_tag(self._store.url)
        self._config = LoadConfig(retry_s=timeout_s, absence_s=absence_s, pinned_bytes=pinned_bytes)
        parsed = None if attempt is None else _parsed(attempt)
        if step is not None:
            if tag is not None:
                raise UsageError(f"open_checkpoint() was given the tag {tag!r} and the step {step!r}: give one of them")
            step = arguments.counted("step", step, most=STEP_MAX)
        self._reading = CheckpointFinder(self._store, tag, step=step, attempt=parsed, config=self._config)
        self._timeout_s, self._unpickle = timeout_s, pickle_client_state
        self._process = os.getpid()
        self._told = False
        """Whether the user has got any value of the checkpoint. After that, this object never switches to another one."""
        self._client_state: dict[str, object] | None = None
        self._writer = WriterThread(threads=PersistConfig().encoders)
        self._close_unused = weakref.finalize(self, self._writer.close, wait=False)
        try:
            self._world = self._begun()
        except BaseException as error:
            self.close()
            is_missing = isinstance(error, NotFoundError) and directory_of(self._store.url) is not None
            if is_missing and (other := of_others(self._store.url)) is not None:
                raise NotFoundError(f"there is no checkpoint at {self._store.url}: {other}") from error
            raise

    def _begun(self) -> CheckpointView:
        world = self._call(self._reading.begin())
        commit = world.checkpoint.commit
        if commit.files:
            raise UsageError(
                f"{world.checkpoint.tag} at {self._store.url} holds files of another program, and no state: load the directory "
                f"{commit.shown_at!r} beside the root with that program"
            )
        return world

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """The root, as a path."""
        return self._store.url

    @property
    def tag(self) -> str:
        """The tag, even if you opened `latest` or named none."""
        return self._checkpoint.tag

    @property
    def attempt(self) -> str:
        """The committed attempt of that tag, as `checkpointd explain` names it."""
        return str(self._checkpoint.id)

    @property
    def step(self) -> int:
        """The step that save() was given."""
        return self._checkpoint.commit.step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that save() was given on rank 0."""
        return dict(self._checkpoint.commit.metrics)

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self._checkpoint.commit.world_size

    @property
    def committed_at(self) -> float | None:
        """When it was committed, in seconds since 1970, by the clock of the machine that committed it; None if that was not
        recorded.
        """
        return seconds_of(self._checkpoint.commit.writer.time)

    @property
    def client_state(self) -> dict[str, Any]:
        """The client_state that save() was given: the values that were equal on all ranks. It is read at the first access.

        In a process group with the number of ranks that saved it, this rank's own. Needs no class of the job's: a member of an
        enum that is not imported is a `StoredMember`, such a named tuple a dict. Raises UnsafeObjectError for a value that
        was stored as a pickle, DamagedError, NotFoundError, StoreError.
        """
        if self._client_state is None:
            self._client_state = self._read_client_state()
        return self._client_state

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Newer checkpoints that were skipped because they are damaged, each with its damage in words."""
        return tuple(self._reading.passed_over)

    @property
    def world(self) -> CheckpointView:
        """The checkpoint view: the values of all ranks, as the indexes list them."""
        self._check_open()
        self._told = True
        return self._world

    @property
    def _checkpoint(self) -> LoggedAttempt:
        self._told = True
        return self._world.checkpoint

    def __repr__(self) -> str:
        checkpoint = self._world.checkpoint
        return f"<OpenCheckpoint of {checkpoint.prefix}, step {checkpoint.commit.step}, at {self.root}>"

    # --- its tensors -----------------------------------------------------------------------------------------

    def tensors(self, only: str | None = None, *, rank: int | None = None) -> StateDict:
        """The tensors by FQN, or by their names below `only`. Each is read when you ask for it, none before.

        `rank`: whose tensor to take where ranks stored different ones under one name. Raises NotFoundError if no tensor lies
        below `only`, UsageError if there is no such rank.
        """
        selection, differing = select_all(self.world, only, rank)
        return StateDict(self._world, selection, differing, self.read)

    def tensor(self, fqn: str, *, rank: int | None = None) -> torch.Tensor:
        """One whole tensor on the CPU, however the ranks had sharded it. Raises NotFoundError if there is none of that name."""
        found = self.tensors(rank=rank)
        if fqn not in found:
            near = [name for name in found if name.startswith(f"{fqn}.") or name.endswith(f".{fqn}")]
            hint = f"did you mean {', '.join(near[:8])}?" if near else "tensors() has all names"
            raise NotFoundError(f"{self.tag} holds no tensor {fqn!r}; {hint}")
        return found[fqn]

    def read(self, wants: Sequence[BoxRequest]) -> None:
        """Fill the sinks of `wants`. Raises DamagedError for the first damage, NotFoundError if the checkpoint was removed."""
        _check_wants(wants)
        world = self.world
        patient = partial(self._reading.patient, world.checkpoint)
        damage = self._writer.call_with_progress_timeout(
            lambda on_bytes: read_boxes(patient(lambda: on_bytes(1)), world, wants, self._config), self._timeout_s
        )
        if damage:
            raise self._call(self._reading.verdict(world.checkpoint, damage[0])) from damage[0]

    # --- loading ---------------------------------------------------------------------------------------------

    def load(
        self,
        into: MutableMapping[str, Any],
        *,
        only: str | Collection[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        verify_first: bool = False,
    ) -> Loaded:
        """Load it into the objects of `into`, in place, as Checkpointer.load does. Other ranks need not call it.

        `only`: the names of the parts to load, such as "model". All other parts of `into` and the checkpoint are ignored, and
        `Loaded.client_state` is empty. Of sharded modules, only this rank's shards are read: open the same tag on every rank.
        In a process group, stored values that this rank has no place for may be another rank's, and are not an error. If a
        Checkpointer of this process saves these objects, call its `fence()` first.

        Bytes are read straight into the tensors and verified there. `verify_first`: read and verify everything first, and again
        to load it, so that damage leaves the objects as they are. Raises MismatchError listing every difference
        (`strict=False` loads what fits), UsageError if `into` is no dict or lacks a part that `only` names, DamagedError,
        NotFoundError if the checkpoint was removed or lacks such a part, StoreError; PartlyLoadedError if any of these happens
        after it has begun to fill the objects.
        """
        check_load(into, strict=strict, fallback=True, cast=cast, verify_first=verify_first)
        names = None if only is None else _names(only)
        state = into if names is None else _chosen(into, names)
        restoration, client_state = self._filled(
            state,
            LoadOptions(strict, cast, self._unpickle, verify_first, classes=self._classes),
            lambda content: content if names is None else part_of(content, names, client_state=False),
        )
        if names is not None and not into:
            self._check_there(names, state)
        if state is not into:
            into.update(state)
        warning = restoration.left_out(self.tag)
        if warning and self._ranks().rank == 0:
            log.warning("%s", warning)
        return loaded_of(self._source(), restoration, client_state, self.passed_over)

    def _filled(
        self, state: MutableMapping[str, Any], options: LoadOptions, part: Callable[[RankContent], RankContent]
    ) -> tuple[Restoration, dict[str, object]]:
        """Read every value into its place. If the checkpoint is removed meanwhile, read the next one over it."""
        touched: frozenset[str] = frozenset()
        answers = HandedOutStates()

        def fill(source: StoredSource) -> Restoration:
            nonlocal touched
            own = part(source.content())
            content, restoration = prepared(source, state, own, options, part=part, answers=answers)
            self._check_named(restoration)
            source.locate(restoration.targets, content)
            if options.verify_first:
                source.verify(restoration.targets, content)
            elif restoration.live:  # one that was removed before must not count as loaded in part
                self._call(self._reading.check_there(source.checkpoint, patiently=True))
            fqns = frozenset(target.fqn for target in restoration.targets)
            if not touched <= fqns:
                raise MismatchError(f"{source.tag} lacks {min(touched - fqns)}, which was read from the checkpoint before it")
            if restoration.live:
                touched = fqns
            source.fill(restoration.targets, content)
            return restoration

        try:
            restoration = self._from_whole(fill)
            return restoration, restoration.finish()
        except Exception as error:
            if not touched:
                raise
            raise PartlyLoadedError(
                f"loading {self._world.checkpoint.tag} failed after it had begun to fill the objects, which now hold a "
                f"mixture of old and new values: {error}. Do not use them: make them anew, and load again"
            ) from error

    def _check_there(self, names: Sequence[str], made: Mapping[str, Any]) -> None:
        """NotFoundError if a part of `names` was not `made` because the checkpoint does not hold it."""
        content = self._source().content()
        left = content.left | content.elsewhere
        absent = [name for name in names if name not in made and not any(f"{fqn}.".startswith(f"{name}.") for fqn in left)]
        if absent:
            parts = listed(parts_of(content)) or "none"
            raise NotFoundError(f"{self.tag} holds no part {', '.join(map(repr, absent))}; its parts are: {parts}")

    def _check_named(self, restoration: Restoration) -> None:
        """UsageError if ranks load parts of one tensor and each may have found another newest checkpoint (OPEN-2)."""
        part = next((target.fqn for target in restoration.targets if target.held is not None), None)
        if part is not None and self._reading.tag in (None, LATEST) and self._ranks().world_size > 1:
            raise UsageError(
                f"{part} is sharded over ranks, and each might find another newest checkpoint: open it by its tag, the same on "
                "all of them. One rank can open the newest, and broadcast its .tag"
            )

    def _read_client_state(self) -> dict[str, object]:
        def fill(source: StoredSource) -> Restoration:
            content = part_of(source.content(), (), client_state=True)
            options = LoadOptions(strict=False, unpickle=self._unpickle, stand_in=True, classes=self._classes)
            restoration = prepare({}, content, options)
            source.fill(restoration.targets, content)
            return restoration

        return self._from_whole(fill).finish()

    def _from_whole(self, read: Callable[[StoredSource], T]) -> T:
        """Call `read` with the checkpoint, or with another one if it proves damaged or was removed. Then never switch again."""
        while True:
            source = self._source()
            try:
                found = read(source)
            except (DamagedError, NotFoundError) as error:
                self._go_on(error)
            else:
                self._told = True
                return found

    def _ranks(self) -> Ranks:
        """This process's place in its process group; without a group it counts as the only rank, whatever a launcher says."""
        return group_ranks(self._group) or Ranks()

    def _source(self) -> StoredSource:
        self._check_open()
        checkpoint = self._world.checkpoint
        return StoredSource(
            self._store,
            self._writer,
            self._config,
            self._timeout_s,
            self._ranks(),
            checkpoint,
            on_absence=lambda: self._reading.check_there(checkpoint),
            known=self._world,
        )

    def _go_on(self, error: CheckpointdError) -> None:
        """Switch to another checkpoint after reading this one ended with `error`. Raises if a switch is not allowed."""
        checkpoint = self._world.checkpoint
        if self._told:
            raise self._call(self._reading.verdict(checkpoint, error)) from error
        self._world = self._call(self._reading.instead(checkpoint, error))

    # --- its life --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release threads and memory. A second call, or a call in a forked child, does nothing."""
        if self._close_unused.detach() is None or os.getpid() != self._process:
            return
        try:
            self._writer.call(self._store.close(), self._timeout_s)
        finally:
            self._writer.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        timeout_s = LOOK_S + self._config.retry_s + self._config.absence_s
        return self._writer.call(work, timeout_s, lambda: what_is_awaited(self._reading.patience))

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this process was forked, so it lacks the reader's threads: call open_checkpoint() in it")
        if not self._close_unused.alive:
            raise ClosedError("the reader was closed: call open_checkpoint() again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check_directory(root: str) -> None:
    """NotFoundError if `root` is no directory; UnreadableError if this user may not look."""
    try:
        if stat.S_ISDIR(os.stat(root).st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UnreadableError(f"opening {root} failed: {in_words(error, 'read')}") from error
    other = of_others(root)
    raise NotFoundError(f"there is no directory {root}: {other or 'give the root that the job was given'}")


def _names(only: object) -> tuple[str, ...]:
    """The names that the argument `only` of load() gives."""
    names = (only,) if isinstance(only, str) else tuple(only) if isinstance(only, Collection) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"only is {shown(only)}; it must be the name of a part, such as 'model', or a list of names, or None")
    return names


def _chosen(into: MutableMapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The parts of `into` to load. If `into` is empty, the load makes them all."""
    strange = [name for name in names if name not in into] if into else []
    if strange:
        raise UsageError(
            f"only={', '.join(map(repr, strange))} names no part of the objects to load into: {', '.join(map(repr, into))}"
        )
    return {name: into[name] for name in names if name in into}


def _check_wants(wants: object) -> None:
    if not isinstance(wants, Sequence) or not all(isinstance(want, BoxRequest) for want in wants):
        raise UsageError(f"wants is {shown(wants)}; it must be a list of BoxRequest. tensor() and tensors() read by name")


def _parsed(attempt: object) -> AttemptId:
    found = AttemptId.parse(attempt) if isinstance(attempt, str) else None
    if found is None:
        raise UsageError(f"{attempt!r} is not an attempt: give one as the command explain shows it, or .attempt of a reader")
    return found
