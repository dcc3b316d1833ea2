"""Plans a load into the user's objects, in place.

Invariants
  RESTORE-1  `prepare` changes none of the user's objects. It makes all checks, and reports everything that is wrong at once.
  RESTORE-2  A load fills the memory that the user's objects have. It allocates only missing memory, after every check: of new
      tensors, of modules on the meta device, and of composite tensors that are converted.
  RESTORE-3  After `finish` the objects hold the captured values, bit for bit, in the stored dtypes; with `cast`, floating
      tensors are converted to the dtypes of the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from checkpointd.errors import FormatError, MismatchError
from checkpointd.layout import tree
from checkpointd_client.capture import state_dicts
from checkpointd_client.capture.modules import Modules
from checkpointd_client.capture.pickled import unpacked
from checkpointd_client.capture.scalars import key_text
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.ranks import mismatches
from checkpointd_client.restore import building
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.bind import Equal, Target
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.matching.match_composite import conflicts
from checkpointd_client.restore.matching.matcher import Matcher, matched, with_weights
from checkpointd_client.restore.stored import Stored
from checkpointd_client.restore.target_chooser import TargetChooser, described

__all__ = ["Restoration", "Target", "askable", "prepare"]


@dataclass
class Restoration:
    """A load that is ready to begin: read every target's tensor in, then call `finish` once.

    `targets` are the stored tensors to read, each once. `missing` names values of the user's objects that are not in the
    checkpoint, `unexpected` the reverse, both by FQN. `mismatched` describes values that are in both and do not fit.
    `per_rank_left` names values that differed between the saving ranks, so that none of them can be chosen. `stateless` names
    the parameters for which no optimizer state is stored.

    The ranks agree on the rest (`load_rounds.Fit`). `unplaced`: values without a place on this rank, which are unexpected if no
    other rank has a place for them either. `saw_all`: this rank matched the content of all ranks. `fits`: some of it fits here.
    `strangers`: the error that nothing fits, which is raised if no rank finds anything that fits.
    """

    targets: tuple[Target, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    per_rank_left: tuple[str, ...]
    stateless: tuple[str, ...]
    unplaced: tuple[str, ...]
    saw_all: bool
    fits: bool
    strangers: MismatchError | None
    _missing_told: tuple[str, ...] = field(repr=False)
    _tree: tree.Dict = field(repr=False)
    _copies: list[Callable[[], None]] = field(repr=False)
    _steps: list[tuple[Callable[[Any], object], Callable[[], Any]]] = field(repr=False)
    _client_state: Callable[[], dict[str, object]] = field(repr=False)
    live: tuple[torch.Tensor, ...] = field(repr=False)
    """The memory of the user's objects that is filled. New memory, which the objects get in `finish`, is left out."""

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for each missing, unexpected or mismatched value."""
        return (*self._missing_told, *map(mismatches.unexpected, self.unexpected), *self.mismatched)

    def placed(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """Those of `fqns` that were matched and have a place here."""
        there = frozenset(_paths(self._tree, ""))
        return tuple(fqn for fqn in fqns if fqn in there and not mismatches.stands_in(fqn, self.unplaced))

    def left_out(self, tag: str) -> str:
        """The warning that the checkpoint `tag` is loaded in part; empty if all of it is loaded."""
        counts = len(self.missing), len(self.unexpected), len(self.mismatched)
        return mismatches.left_out(tag, *counts, self.differences) if any(counts) else ""

    def finish(self) -> dict[str, object]:
        """Tie and copy places that share a stored tensor, set other values and let objects load; returns the client state."""
        for copy in self._copies:
            copy()
        for apply, build in self._steps:
            apply(build())
        return self._client_state()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is matched against the user's objects.

    `strict`: every difference is an error; otherwise all that fits is loaded. `cast`: floating-point tensors may have another
    floating dtype, and are converted. `unpickle`: pickled objects in client_state may run their code. `verify_first`: all bytes
    are read and verified before any object is touched, and then read again to fill them. `share_reads`: ranks that read the
    same share the reading when they fill. `stand_in`: values whose class this process does not have get a stand-in
    (`building.value_of`).
    `classes`: the classes of tensors that may be made.
    """

    strict: bool = True
    cast: bool = False
    unpickle: bool = False
    verify_first: bool = False
    share_reads: bool = False
    stand_in: bool = False
    classes: TensorClasses = ONLY_BUILT_IN


def _unknown(_one: str, _two: str) -> bool:
    return False


def prepare(
    state: MutableMapping[str, Any] | TargetChooser,
    content: RankContent,
    options: LoadOptions,
    *,
    equal: Equal = _unknown,
    answers: HandedOutStates | None = None,
) -> Restoration:
    """Match a checkpoint against the objects in `state`, touching none of them.

    If `options.strict`, MismatchError lists everything that is missing, unexpected or of another shape, dtype or kind.
    Otherwise MismatchError is raised only if nothing fits. Objects that load themselves may be asked for their state first, if
    only that tells how they are sharded; `answers` keeps the states that they hand out. Tensors that were stored apart and are
    tied now count as one tensor if they are `equal`.

    Raises UnsafeObjectError for pickled objects in client_state, unless `options.unpickle` is set; FormatError for a tree that
    contradicts itself; StateError for an object that cannot be loaded into, such as one on the meta device, for a dict that
    was passed instead of the object that it came from, and for a value whose class is not imported here.
    """
    try:
        return _prepare(state, content, options, equal=equal, answers=answers)
    except RecursionError as error:
        raise _too_deep() from error


def askable(state: MutableMapping[str, Any] | TargetChooser, content: RankContent) -> dict[str, object]:
    """The objects that `prepare` may ask for their state, by FQN. Raises FormatError as `prepare` does."""
    stored = _stored(content)
    try:
        wanted = state.places(described(stored)).state if isinstance(state, TargetChooser) else state
        return dict(with_weights(wanted, stored.state, stored))
    except RecursionError as error:
        raise _too_deep() from error


def _too_deep() -> FormatError:
    return FormatError("the state tree is nested too deeply for the free part of Python's stack")


def _stored(content: RankContent) -> Stored:
    return Stored(content.root, content.entries, content.aliases)


def _prepare(
    state: MutableMapping[str, Any] | TargetChooser,
    content: RankContent,
    options: LoadOptions,
    *,
    equal: Equal,
    answers: HandedOutStates | None,
) -> Restoration:
    stored = _stored(content)
    faults: list[str] | None = None
    if isinstance(state, TargetChooser):
        places = state.places(described(stored))
        state, faults = places.state, places.faults
    elif (refused := state_dicts.refused(state)) is not None:
        raise refused
    match = matched(
        state,
        stored,
        content,
        Modules(state),
        equal=equal,
        answers=answers,
        classes=options.classes,
        cast=options.cast,
        stand_in=options.stand_in,
    )
    if faults is not None:  # a TargetChooser leaves out what it does not want
        match.unexpected.clear()
        match.elsewhere.clear()
        match.mismatched += faults
    fits = bool(match.bindings.by_fqn or match.steps)
    strangers = None if options.strict or fits else _strangers(match, state)
    if strangers is not None and not content.among_many:
        raise strangers
    match.per_rank_left += match.left_below("client_state")
    client = match.fresh(stored.client_state or tree.Dict("dict", ()))
    match.mismatched.extend(dict.fromkeys((*match.bindings.conflicts(equal), *conflicts(match))))
    unplaced = (*match.unexpected, *match.elsewhere)
    if content.among_many:
        match.unexpected = []
    if options.strict and (found := _differences(match, state)):
        raise mismatches.error(found)
    live = tuple(memory for _, memory in match.bindings.filled())
    targets, copies = match.bindings.bind(stored.entries)
    steps = [(step.apply, step.build) for step in sorted(match.steps, key=attrgetter("turn"))]
    # All values are made here, so that those that cannot be made are found before anything is changed.
    values = [step() for _, step in steps]
    unpickled = unpacked(client(), allowed=options.unpickle)
    if not match.has_late:
        steps = [(apply, building.given(value)) for (apply, _), value in zip(steps, values, strict=True)]
    return Restoration(
        targets=targets,
        missing=tuple(match.missing),
        unexpected=tuple(match.unexpected),
        mismatched=tuple(match.mismatched),
        per_rank_left=tuple(dict.fromkeys(match.per_rank_left)),
        stateless=tuple(match.stateless),
        unplaced=unplaced,
        saw_all=content.among_many,
        fits=fits,
        strangers=strangers,
        _missing_told=_missing(match, state),
        _tree=stored.state,
        _copies=[*copies, *match.checks, *(one.fill for one in match.converted), match.note_filled],
        _steps=steps,
        _client_state=(lambda: unpacked(client(), allowed=options.unpickle)) if match.has_late else building.given(unpickled),
        live=live,
    )


def _differences(match: Matcher, state: MutableMapping[str, Any]) -> tuple[str, ...]:
    return (*_missing(match, state), *map(mismatches.unexpected, match.unexpected), *match.mismatched)


def _missing(match: Matcher, state: MutableMapping[str, Any]) -> tuple[str, ...]:
    parts = set(map(key_text, state))
    has = f", which has {_parts(match)}"
    return tuple(f"{fqn}: missing from the checkpoint{has if fqn in parts else ''}" for fqn in match.missing)


def _paths(node: tree.Node, fqn: str) -> Iterator[str]:
    """All places below `node`, and the place of the state of every parameter of an optimizer."""
    pairs: Iterable[tuple[object, tree.Node]] = ()
    if isinstance(node, tree.Dict):
        pairs = ((key_text(key), child) for key, child in Stored.children(node, stand_in=True))
    elif isinstance(node, tree.Sequence):
        pairs = enumerate(node.items)
        optimizer, _, place = fqn.partition(".param_groups.")
        if place.endswith(".params"):
            yield from (f"{optimizer}.state.{name}" for name in node.items)
    for key, child in pairs:
        path = f"{fqn}.{key}" if fqn else str(key)
        yield path
        yield from _paths(child, path)


def _parts(match: Matcher) -> str:
    """The names of the parts of the stored state, for messages."""
    return ", ".join(str(key) for key, _ in match.stored.children(match.stored.state)) or "nothing"


def _strangers(match: Matcher, state: MutableMapping[str, Any]) -> MismatchError | None:
    """The error that nothing fits, which holds for strict=False, too; None if something does."""
    found = _differences(match, state)
    if not (found and match.stored.state.items):
        return None
    return MismatchError(
        f"nothing of the checkpoint fits the objects to load into, and nothing was loaded: it holds {_parts(match)}, and "
        f"the state to load into has {', '.join(map(str, state))}:\n  " + "\n  ".join(found[: mismatches.TOLD_MAX]),
        found,
    )
