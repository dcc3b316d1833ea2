"""Changes the Trainer and Accelerate so that they do not treat a save as a checkpoint before it commits.

Both write `checkpoint-N` directories, remove old ones once they have called save, and load the directories that they find. This
module replaces methods of their classes and names in the Trainer's own module, so it works no matter who imported these before.

Invariants
  TRAINER-1  A `checkpoint-N` of Transformers or Accelerate gets that name only at its commit, and then it is whole, with the
      files of the library and of the engine. So no function can find an uncommitted one.
  TRAINER-2  A rotation removes no committed checkpoint in favour of one that has not committed (`rotating.py`).
  TRAINER-3  A function that looks for files of a save in flight waits for it first. If Accelerate is to load a checkpoint that
      does not exist, it raises an error.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from checkpointd.errors import NotFoundError, UsageError
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter, SaveTarget
from checkpointd_client.integrations.deepspeed.huggingface.filling import Filled, Filling, current
from checkpointd_client.integrations.deepspeed.huggingface.rotating import Limit, Saves

log = logging.getLogger("checkpointd")

_Function = Callable[..., Any]


def check_layout(layout: object) -> None:
    """UsageError for the layout whose checkpoints these libraries do not find."""
    if layout == "checkpointd":
        raise UsageError(
            "install() supports only layout='deepspeed': Hugging Face's Trainer and Accelerate resume from, rotate and load "
            "checkpoint-N directories that hold DeepSpeed's files, and layout='checkpointd' stores none there. Leave the "
            "layout out; in your own training loop, attach(engine, layout='checkpointd') works"
        )


_MODEL_NAME = "pytorch_model"
"""The tag that Accelerate saves under."""
_SAVES = Saves()
_PLUGS: WeakKeyDictionary[Any, Adapter] = WeakKeyDictionary()
"""The adapters of the engines that are watched."""

_IN_LOAD_STATE: ContextVar[bool] = ContextVar("in Accelerate's load_state", default=False)
"""load_state ignores the result of the engine's load_checkpoint, so a missing checkpoint must raise an error there."""


def watch(engine: Any, plug: Adapter) -> None:
    """Follow the saves of an attached engine."""
    save, load = engine.save_checkpoint, engine.load_checkpoint
    _PLUGS[engine] = plug

    @functools.wraps(save)
    def save_checkpoint(save_dir: str, *args: Any, **kwargs: Any) -> Any:
        filling = current()
        if filling is not None and filling.takes(save_dir):
            filling.call = args, kwargs  # begins when all of it is filled
            return True
        try:
            return save(save_dir, *args, **kwargs)
        finally:
            handle = engine.checkpoint_handle()
            if handle is not None:
                _SAVES.add(save_dir, handle)

    @functools.wraps(load)
    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> Any:
        found = load(load_dir, *args, **kwargs)
        if found[0] is None and _IN_LOAD_STATE.get():
            raise NotFoundError(f"no checkpoint was committed in {load_dir}: it cannot be loaded")
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def teach() -> None:
    """Make the imported ones of the two libraries follow TRAINER-1 to TRAINER-3. It may be called again."""
    if "transformers" in sys.modules:
        module = importlib.import_module("transformers.trainer")
        _replace(module, "rotate_checkpoints", _rotating)
        _replace(module, "deepspeed_load_checkpoint", _settled)
        with suppress(ImportError):  # releases without it
            jit = importlib.import_module("transformers.trainer_jit_checkpoint")
            _replace(jit.CheckpointManager, "execute_jit_checkpoint", _saving_at_once)
        for name, wrap in _OF_TRAINER.items():
            _replace(module.Trainer, name, wrap)
    if "accelerate" in sys.modules:
        accelerator = importlib.import_module("accelerate").Accelerator
        _replace(accelerator, "save_state", _saving_state)
        _replace(accelerator, "load_state", _loading_state)


def _replace(home: Any, name: str, wrap: Callable[[_Function], _Function]) -> None:
    """Replace `name` of `home` by the wrapped function."""
    original = getattr(home, name, None)
    if original is None:
        log.warning("this release has no %s: see docs/DEEPSPEED.md for the releases that were tried", name)
    elif not hasattr(original, "checkpointd"):
        wrapped = wrap(original)
        wrapped.checkpointd = True  # type: ignore[attr-defined]  # says that it is done
        setattr(home, name, wrapped)


def _after(first: Callable[[], None]) -> Callable[[_Function], _Function]:
    """A wrapper for functions, which calls `first` before the function."""

    def wrap(original: _Function) -> _Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            first()
            return original(*args, **kwargs)

        return call

    return wrap


_settled = _after(lambda: _SAVES.settle())
_training = _after(lambda: _SAVES.begin())


# --- filling a directory ----------------------------------------------------------------------------------------


def _filling(engine: Any, directory: str) -> Filling | None:
    """Let `directory` be filled out of sight for the next save of `engine`; None if checkpointd does not save it there."""
    plug = None if engine is None else _PLUGS.get(engine)
    if plug is None or not plug.is_attached:
        return None
    directory = os.path.abspath(directory)
    root = SaveTarget.root_of(directory, plug._root)
    if directory == root:
        return None
    given = plug._checkpointer(root).fill(os.path.relpath(directory, root))
    return Filling(directory, Filled(given.name, given.path))


def _save_filled(engine: Any, filling: Filling, *usual: str) -> None:
    """Let the engine save as the library asked, together with the filled directory. All ranks must call it: a rank on which an
    error of the storage kept the library from asking uses the `usual` arguments.
    """
    plug = _PLUGS[engine]
    call = filling.call or ((usual, {}) if filling.filled.fault else None)
    if call is None:
        filling.drop()
        raise UsageError(
            f"{filling.directory} was filled, and no rank's engine was asked to save: call the engine's save_checkpoint in "
            "_save_checkpoint or save_state, as the library itself does"
        )
    args, kwargs = call
    plug.filled = filling.filled
    try:
        engine.save_checkpoint(filling.directory, *args, **kwargs)
    finally:
        plug.filled = None
        if plug.handle is None:  # no save has begun that would remove it
            filling.drop()


@contextmanager
def _instead(home: Any, **functions: _Function) -> Iterator[None]:
    """Replace attributes of an object within the block."""
    with ExitStack() as stack:
        for name, function in functions.items():
            own = vars(home).get(name)
            stack.callback(*((delattr, home, name) if own is None else (setattr, home, name, own)))
            setattr(home, name, function)
        yield


# --- Trainer ----------------------------------------------------------------------------------------------------


def _saving_checkpoint(original: _Function) -> _Function:
    @functools.wraps(original)
    def _save_checkpoint(self: Any, model: Any, trial: Any = None, **kwargs: Any) -> Any:
        run_dir = self._get_output_dir(trial=trial)
        engine = None if self.args.save_only_model else getattr(self, "deepspeed", None)
        best = self.state.best_model_checkpoint
        if best is not None and os.path.isdir(best):
            _SAVES.note_best(run_dir, best)
        filling = _filling(engine, os.path.join(run_dir, f"checkpoint-{self.state.global_step}"))
        if filling is None:
            return original(self, model, trial, **kwargs)
        elsewhere, save_to_json = os.path.dirname(filling.filled.path), self.state.save_to_json

        def state_saved(path: str) -> None:
            _name_best(self.state, run_dir, elsewhere)
            with filling.keeping():
                save_to_json(path)

        pushes: list[str] = []
        steps = {name: filling.kept(getattr(self, name)) for name in _WRITING if hasattr(self, name)}
        if hasattr(self, "_push_from_checkpoint"):
            steps["_push_from_checkpoint"] = pushes.append
        with (
            filling.active(),
            _instead(self, _get_output_dir=lambda *_, **__: elsewhere, **steps),
            _instead(self.state, save_to_json=state_saved),
        ):
            found = original(self, model, trial, **kwargs)
        _name_best(self.state, run_dir, elsewhere)
        _save_filled(engine, filling)
        if pushes:  # only a committed checkpoint goes to the hub, under its own name
            handle = _PLUGS[engine].handle
            if handle is not None and handle.ended_within(None) and handle.phase == "committed":
                self._push_from_checkpoint(filling.directory)
        return found

    return _save_checkpoint


_WRITING = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


def _name_best(state: Any, run_dir: str, elsewhere: str) -> None:
    """Set the best checkpoint to the name that it has, or will have at its commit."""
    step = getattr(state, "best_global_step", None)
    name = f"checkpoint-{step}"
    if step and any(os.path.isdir(os.path.join(folder, name)) for folder in (run_dir, elsewhere)):
        state.best_model_checkpoint = os.path.join(run_dir, name)


def _rotating(original: _Function) -> _Function:
    @functools.wraps(original)
    def rotate_checkpoints(output_dir: str, save_total_limit: int | None = None, *args: Any, **options: Any) -> None:
        filling = current()
        if filling is None:  # no attached engine takes part
            original(output_dir, save_total_limit, *args, **options)
            return
        named = dict(zip(("best_model_checkpoint", "use_mtime", "checkpoint_prefix"), args, strict=False)) | options
        names = rf"{re.escape(named.get('checkpoint_prefix', 'checkpoint'))}-\d+"
        limit = Limit(save_total_limit or 0, names, "trainer_state.json", filling.above, named.get("best_model_checkpoint"))
        _SAVES.limit(filling.real(os.fspath(output_dir)), limit)

    return rotate_checkpoints


def _saving_at_once(original: _Function) -> _Function:
    """On SIGTERM the Trainer makes `checkpoint-N` itself, marked as unfinished. Here it only appears when it is whole."""

    @functools.wraps(original)
    def execute_jit_checkpoint(self: Any) -> Any:
        trainer = self.trainer
        engine = None if trainer.args.save_only_model else getattr(trainer, "deepspeed", None)
        if engine is None or engine not in _PLUGS or not _PLUGS[engine].is_attached:
            return original(self)
        self.is_checkpoint_requested = False
        trainer._save_checkpoint(trainer.model, trial=None)
        return None

    return execute_jit_checkpoint


def _finalizing(original: _Function) -> _Function:
    """The end of a training uses the best checkpoint, which must be committed."""

    @functools.wraps(original)
    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        _SAVES.settle()
        best = self.state.best_model_checkpoint
        if best is not None and _SAVES.has_failed(best):
            earlier = _SAVES.best(os.path.dirname(best))
            instead = "the model keeps the weights of the last step" if earlier is None else f"{earlier} counts as the best"
            log.error("the best checkpoint, %s, could not be saved: %s", best, instead)
            self.state.best_model_checkpoint = earlier
        return original(self, *args, **kwargs)

    return _finalize_training


def _saving_model(original: _Function) -> _Function:
    """A model that the user saves may need the space that a failing save frees."""

    @functools.wraps(original)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        if not _internal_call:
            _SAVES.settle()
        return original(self, output_dir, _internal_call)

    return save_model


_OF_TRAINER: dict[str, Callable[[_Function], _Function]] = {
    "_save_checkpoint": _saving_checkpoint,
    "save_model": _saving_model,
    "train": _training,
    "_finalize_training": _finalizing,
}


# --- Accelerate -------------------------------------------------------------------------------------------------


def _loading_state(original: _Function) -> _Function:
    load = _settled(original)

    @functools.wraps(original)
    def load_state(self: Any, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            _begin(self)
        token = _IN_LOAD_STATE.set(True)
        try:
            return load(self, input_dir, *args, **kwargs)
        finally:
            _IN_LOAD_STATE.reset(token)

    return load_state


def _begin(accelerator: Any) -> None:
    """Start at the root of an Accelerator's checkpoints before it chooses the newest: a checkpoint that an earlier job
    committed, but could not show before it died, appears then.
    """
    plug = _PLUGS.get(accelerator._models[0]) if len(accelerator._models) == 1 else None
    if plug is None:
        return
    place = _place_of(accelerator)
    if plug._meet("load_state()", {"load_dir": os.path.abspath(place)}, plug._is_own(place))[0]:
        plug._checkpointer(SaveTarget.root_of(place, plug._root))


def _saving_state(original: _Function) -> _Function:
    """Accelerate removes old checkpoints before it saves: here they go when the new one has committed."""

    @functools.wraps(original)
    def save_state(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        naming = self.project_configuration
        engine = self._models[0] if len(self._models) == 1 else None
        names, limit = naming.automatic_checkpoint_naming, naming.total_limit
        directory = _place_of(self) if names else output_dir
        filling = None if directory is None else _filling(engine, os.fspath(directory))
        if filling is None:
            if names and limit is not None:
                _SAVES.settle()
                self.wait_for_everyone()
            return original(self, output_dir, *args, **kwargs)
        if names and os.path.exists(filling.directory):
            raise ValueError(f"{filling.directory} is there already: set save_iteration to the number of the next checkpoint")
        iteration = naming.iteration
        with filling.active():
            naming.automatic_checkpoint_naming = False
            try:
                with filling.keeping():
                    original(self, filling.filled.path, *args, **kwargs)
            finally:
                naming.automatic_checkpoint_naming = names
        naming.iteration = iteration + 1  # on each rank, whether its files could be written or not
        if names and self.is_main_process:
            kept = None if limit is None else Limit(limit, r"checkpoint_\d+", "random_states_0.pkl", filling.above)
            _SAVES.limit(os.path.dirname(filling.directory), kept)
        _save_filled(engine, filling, _MODEL_NAME)
        return Path(filling.directory)

    return save_state


def _place_of(accelerator: Any) -> str:
    """Where Accelerate names the next checkpoint by itself; the directory above it is made."""
    folder = os.path.join(accelerator.project_dir, "checkpoints")
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, f"checkpoint_{accelerator.save_iteration}")
