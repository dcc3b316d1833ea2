"""Decides whether load_checkpoint loads a checkpoint of DeepSpeed itself, with `layout="checkpointd"` (`files_choice.py`: with
"deepspeed").
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from checkpointd.errors import CheckpointdError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.root.ballots import ballot_key
from checkpointd_client.integrations.deepspeed.offline.file_names import is_zero_checkpoint, pointed, read_latest, stock_files
from checkpointd_client.integrations.deepspeed.offline.safe_unpickle import read


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """`theirs`: the tag to load of DeepSpeed itself. `doubt`: why none can be chosen. None of both: one of checkpointd's."""

    theirs: str | None = None
    doubt: str | None = None


def stock_in(root: str, load_dir: str, tag: str | None) -> str | None:
    """The tag of DeepSpeed itself that a load of `tag`, or of the newest, may mean; None if there is none."""
    named = _stock_tag(root, load_dir) if tag is None else tag
    return named if named is not None and is_zero_checkpoint(os.path.join(load_dir, named)) else None


def chosen(root: str, load_dir: str, named: str, own: Sequence[LoggedAttempt]) -> TensorChoice:
    """Choose the newer of two: DeepSpeed's checkpoint `named` in `load_dir`, and the first of `own`, which lie at `root`.

    The majority of three signs decides: which was written later, which has the later step, and which program wrote `latest`.
    """
    if not own:
        return TensorChoice(theirs=named)
    signs = [_written_later(root, load_dir, named, own[0]), _further(load_dir, named, own[0])]
    if _is_shared(root, load_dir) and pointed(load_dir) == named:
        signs.append(1 if _stock_tag(root, load_dir) == named else -1)
    if sum(signs) > 0:
        return TensorChoice(theirs=named)
    if sum(signs) < 0:
        return TensorChoice()
    return TensorChoice(
        doubt=f"{load_dir} has {own[0].tag} of checkpointd, of step {own[0].commit.step}, and {named} of DeepSpeed itself: "
        "it is unclear which of the two is newer. Name the tag to load; where both have the same tag, move the files *.pt of "
        "DeepSpeed to a directory of another name"
    )


def _stock_tag(root: str, load_dir: str) -> str | None:
    """The tag in DeepSpeed's `latest`. In a shared `latest`, DeepSpeed's ends without a newline."""
    if _is_shared(root, load_dir):
        with suppress(OSError):
            return None if read_latest(load_dir).endswith(b"\n") else pointed(load_dir)
        return None
    return pointed(load_dir)


def _is_shared(root: str, load_dir: str) -> bool:
    """Whether both programs write the same `latest`."""
    return os.path.realpath(root) == os.path.realpath(load_dir)


def _written_later(root: str, load_dir: str, named: str, own: LoggedAttempt) -> int:
    with suppress(OSError):
        theirs = max(os.stat(path).st_mtime_ns for path in stock_files(os.path.join(load_dir, named)))
        return _sign(theirs - os.stat(os.path.join(root, ballot_key(own.commit))).st_mtime_ns)
    return 0


def _further(load_dir: str, named: str, own: LoggedAttempt) -> int:
    """1 if DeepSpeed's checkpoint has the later step, -1 if ours has; 0 if unknown. Nothing in its files is run."""
    model = next(path for path in sorted(stock_files(os.path.join(load_dir, named))) if path.endswith("_model_states.pt"))
    with suppress(CheckpointdError, OSError):
        step = read(model).get("global_steps")
        return _sign(step - own.commit.step) if isinstance(step, int) else 0
    return 0


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
