"""Chooses the checkpoint that load_checkpoint loads with `layout="deepspeed"` (`tensor_choice.py`: with "checkpointd").

Both checkpointd and DeepSpeed itself may have saved in the directory.

Invariants
  FILESCHOICE-1  Rank 0 lists the checkpoints, and every rank says whether its part of a checkpoint is whole. So all ranks
      choose the same checkpoint, or raise the same error.
  FILESCHOICE-2  The newest checkpoint is chosen, no matter which program saved it. An older one is chosen only if all newer
      ones are damaged.
  FILESCHOICE-3  Files that checkpointd has shown are never loaded unverified, even if the record of their commit is damaged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointd.commands import command
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import shown_key
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd_client.integrations.deepspeed.offline.file_names import is_zero_checkpoint, missing_fault, pointed, stock_files
from checkpointd_client.integrations.deepspeed.reading import FileReads
from checkpointd_client.integrations.directories.opening import DOING, UNREADABLE, WHOLE, Opened, first_said, known_of, words_of

log = logging.getLogger("checkpointd")

_OVER = "saved over:"
"""Begins the message of a rank that finds damage, with all files written after the commit."""


@dataclass(frozen=True, slots=True)
class FilesChoice:
    """The choice of one load_checkpoint, on one rank. `folder`: the path of `load_dir` relative to the root, whose store is at
    `store`. `reading_of` makes the FileReads for each checkpoint that is tried.
    """

    engine: Any
    opened: Opened
    load_dir: str
    folder: str
    tag: str | None
    store: str
    reading_of: Callable[[], FileReads]

    def chosen(self) -> tuple[str | None, LoggedAttempt | None, dict[str, Any]]:
        """The tag to load, its checkpoint, and the contents of its files that this rank has read already, by path.

        It is the newest that all ranks find whole. The checkpoint is None for a tag that DeepSpeed itself saved; both are None
        if there is no checkpoint.
        Raises NotFoundError for a tag that does not exist, DamagedError or UnreadableError, each on every rank.
        """
        candidates, theirs = self._candidates()
        if theirs is not None:
            return theirs, None, {}
        for prefix, checkpoint in candidates:
            reading = self.reading_of()
            heard = self.opened.meet(self._said_of(checkpoint, reading), DOING)
            damage = [text for _, text in sorted(heard.items()) if text != WHOLE]
            if not damage and checkpoint is not None:
                tag = _name_of(checkpoint)
                return tag, checkpoint, reading.by_path(os.path.join(self.load_dir, tag))
            self._raise_unless_older_may_be_taken(prefix, damage, everybody=len(damage) == len(heard))
            log.error("%s is damaged, and an older one is looked for: %s", prefix, "; ".join(damage))
            self.opened.pass_over(prefix, "; ".join(damage))
        if candidates:
            raise DamagedError(f"every checkpoint in {self.load_dir} is damaged: {command('verify', self.load_dir)} says how")
        return None, None, {}

    def _raise_unless_older_may_be_taken(self, prefix: str, damage: list[str], *, everybody: bool) -> None:
        unreadable = [text for text in damage if text.startswith(UNREADABLE)]
        if unreadable:
            raise UnreadableError(
                f"{prefix} in {self.load_dir}: {'; '.join(unreadable)}. It may be whole, so no older one is loaded: repair the "
                "storage and load again, or name an older tag"
            )
        if everybody and all(text.startswith(_OVER) for text in damage):
            raise DamagedError(
                f"all files of {prefix} in {self.load_dir} were written after it was committed, as by a save without "
                "checkpointd: they may be newer than every checkpoint, so no older one is loaded. Load them as they are "
                f"with an engine that is not attached, or name an older tag ({'; '.join(damage)})"
            )
        if self.tag is not None:
            raise DamagedError(f"{self.load_dir}/{self.tag} is damaged: {'; '.join(damage)}")

    def _said_of(self, checkpoint: LoggedAttempt | None, reading: FileReads) -> str:
        """Read this rank's part of a checkpoint and judge it in words. Raises nothing: the other ranks wait for the answer."""
        words = words_of(self.opened, checkpoint, self.engine.global_rank, self.engine.world_size, reading)
        if checkpoint is None or words == WHOLE or words.startswith(UNREADABLE):
            return words
        return f"{_OVER} {words}" if self._is_saved_over(checkpoint) else words

    def _is_saved_over(self, checkpoint: LoggedAttempt) -> bool:
        """Whether every file was written after the checkpoint was shown: neither bit rot nor a change of one file does that."""
        shown = Path(self.store, shown_key(checkpoint.commit.shown_at))
        files = stock_files(os.path.join(self.load_dir, _name_of(checkpoint)))
        try:
            since = shown.stat().st_mtime_ns
            return bool(files) and all(Path(file).stat().st_mtime_ns > since for file in files)
        except OSError:
            return False

    # --- candidates --------------------------------------------------------------------------------------------

    def _candidates(self) -> tuple[list[tuple[str, LoggedAttempt | None]], str | None]:
        """The candidates that rank 0 lists, newest first; or a tag of DeepSpeed itself.

        Each has its prefix, and None in place of a checkpoint that this rank does not see.
        """
        known, fault = self._known()
        beside = [c for c in known.values() if os.path.dirname(c.commit.shown_at) == self.folder]
        named = pointed(self.load_dir) if self.tag is None else self.tag
        found = [c for c in beside if (_is_candidate(c) if self.tag is None else _name_of(c) == named)]
        theirs = self._theirs(beside, named) if self.tag is None else None if found else self.tag
        damaged = missing = None
        if not found and named is not None and self._is_shown(named):
            damaged = f"the record of {self.load_dir}/{named} is damaged: {command('verify', self.load_dir)} says how"
        elif not found:
            missing = missing_fault(self.load_dir, self.tag)
        said = first_said(self.opened, [[c.prefix for c in found if theirs is None], theirs, damaged, missing], fault)
        first, theirs, damaged, missing = said
        if damaged is not None:
            raise DamagedError(damaged)
        if missing is not None:
            raise NotFoundError(missing)
        return [(prefix, known.get(prefix)) for prefix in first], theirs

    def _known(self) -> tuple[dict[str, LoggedAttempt], str | None]:
        """The checkpoints by prefix, newest first, and the error if they cannot be listed.

        Rank 0, which chooses for all ranks, leaves out those whose directory is gone.
        """
        known, fault = known_of(self.opened)
        if self.engine.global_rank != 0 or fault is not None:
            return known, fault
        try:
            removed = self.opened.removed()
        except CheckpointdError as error:
            return {}, str(error)
        for prefix in sorted(removed & known.keys()):
            log.warning("%s in %s was removed: its directory is gone, and the checkpoint goes with it", prefix, self.load_dir)
        return {prefix: checkpoint for prefix, checkpoint in known.items() if prefix not in removed}, None

    def _theirs(self, own: list[LoggedAttempt], named: str | None) -> str | None:
        """The tag `named` in `latest`, if DeepSpeed itself saved it, with an engine that was not attached."""
        if named is None or any(_name_of(c) == named for c in own) or self._is_shown(named):
            return None
        return named if is_zero_checkpoint(os.path.join(self.load_dir, named)) else None

    def _is_shown(self, name: str) -> bool:
        """Whether checkpointd has shown files under this name that still exist (FILESCHOICE-3)."""
        shown = os.path.join(self.store, shown_key(os.path.join(self.folder, name)))
        return os.path.exists(shown) and os.path.isdir(os.path.join(self.load_dir, name))


def _is_candidate(checkpoint: LoggedAttempt) -> bool:
    """Whether a load that names no tag may take it. A directory that was filled for one checkpoint names that one."""
    commit = checkpoint.commit
    return commit.save_latest and (bool(commit.unfinished) or not checkpoint.left_behind)


def _name_of(checkpoint: LoggedAttempt) -> str:
    """The name of the directory that shows the files of a checkpoint."""
    return os.path.basename(checkpoint.commit.shown_at)
