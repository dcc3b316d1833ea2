"""Recognises checkpoints of other programs, and says what reads them. Looks at names and first bytes, and unpickles nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from checkpointd.commands import at_tag, command
from checkpointd.layout.keys import LOG_ROOT, AttemptId, is_tag
from checkpointd.regular_files import open_regular

_LOOK_BYTES = 1 << 20
"""As many bytes at the beginning and at the end of a file tell what it is."""
_ENTRIES_MAX = 10_000
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number with which a file of torch.save begins in the form before torch 1.6."""
_LIGHTNING = b"pytorch-lightning_version"
_MODEL_STATES, _OPTIM_STATES = "_model_states.pt", "_optim_states.pt"
_ZIP_NAME = 30
"""Where the name of the first entry of a zip archive begins."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


def recognised(path: str | os.PathLike[str], root: str = "ROOT") -> str | None:
    """What the file or directory at `path` is, and the command or call that reads it; None if it is of no known format, or
    cannot be read. `root`: where an import would store the checkpoint.
    """
    place = os.path.abspath(path)
    try:
        found = _directory(place, root) if os.path.isdir(place) else _file(place, root)
    except (OSError, ValueError):
        return None
    return None if found is None else f"{os.fspath(path)} {found}"


def is_root(path: str | os.PathLike[str]) -> bool:
    """Whether the directory `path` is a root of checkpointd."""
    return os.path.isfile(os.path.join(path, LOG_ROOT))


def of_others(path: str | os.PathLike[str], root: str = "ROOT") -> str | None:
    """The same, but None for a root of checkpointd and what lies in it."""
    above = os.path.dirname(os.path.abspath(path))
    if any(is_root(place) for place in (path, above)):
        return None
    return recognised(path, root)


# --- directories ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory by the names in it."""

    path: str
    files: frozenset[str]
    folders: tuple[str, ...]
    root: str


def _directory(path: str, root: str) -> str | None:
    with os.scandir(path) as entries:
        found = [(entry.name, entry.is_dir()) for entry, _ in zip(entries, range(_ENTRIES_MAX), strict=False)]
    files = frozenset(name for name, is_folder in found if not is_folder)
    it = _Directory(path, files, tuple(sorted(name for name, is_folder in found if is_folder)), root)
    return next(filter(None, (look(it) for look in _DIRECTORIES)), None)


def _ours(it: _Directory) -> str | None:
    if is_root(it.path):
        return f"is a root of checkpointd, and needs no import: {command('list', it.path)} shows its checkpoints"
    above, tag = os.path.split(it.path)
    if any(map(AttemptId.parse, it.folders)) and is_tag(tag) and is_root(above):
        shown = command("inspect", *at_tag(above, tag))
        return f"is the tag {tag} of the root {above}, and needs no import: {shown} shows it"
    return None


def _deepspeed(it: _Directory) -> str | None:
    if any(name.endswith((_MODEL_STATES, _OPTIM_STATES)) for name in it.files):
        return f"is a checkpoint of DeepSpeed: {command('import', '--from', 'deepspeed', it.path, it.root)} imports it"
    inside = next((name for name in it.folders if _holds(it.path, name, (_MODEL_STATES, _OPTIM_STATES))), None)
    if inside is None:
        return None
    words = ("--from", "deepspeed", it.path, it.root, *(() if "latest" in it.files else ("--tag", inside)))
    return f"is the save_dir of a DeepSpeed job: {command('import', *words)} imports it"


def _dcp(it: _Directory) -> str | None:
    if ".metadata" in it.files and ("common.pt" in it.files or "metadata.json" in it.files):
        return "is a distributed checkpoint of Megatron: convert it with Megatron's tools, or load it there and save it here"
    if ".metadata" in it.files:
        words = command("import", "--from", "dcp", it.path, it.root)
        return f"is a directory of torch.distributed.checkpoint (DCP): {words} imports it"
    if any(name.endswith(".distcp") for name in it.files):
        return "holds files of torch.distributed.checkpoint (DCP) without their .metadata: that save was not completed"
    inside = [name for name in it.folders if os.path.isfile(os.path.join(it.path, name, ".metadata"))]
    if not inside:
        return None
    newest = max(inside, key=lambda name: os.stat(os.path.join(it.path, name, ".metadata")).st_mtime_ns)
    example = command("import", "--from", "dcp", os.path.join(it.path, newest), it.root)
    return f"holds directories of torch.distributed.checkpoint (DCP): import one of them, as in {example}"


def _hugging_face(it: _Directory) -> str | None:
    if "trainer_state.json" in it.files:
        return (
            "is a checkpoint of Hugging Face's Trainer: call install() of checkpointd_client.integrations.huggingface, and "
            f"resume with trainer.train(resume_from_checkpoint={it.path!r}); later checkpoints are checkpointd's"
        )
    index = next((name for name in sorted(it.files) if name.endswith((".safetensors.index.json", ".bin.index.json"))), None)
    if index is not None or ("config.json" in it.files and any(name.endswith((".safetensors", ".bin")) for name in it.files)):
        return f"holds weights in Hugging Face's form: load them with from_pretrained({it.path!r}), {_then_save(it.root)}"
    if "adapter_config.json" in it.files:
        return f"holds an adapter of PEFT: load it with PeftModel.from_pretrained(model, {it.path!r}), {_then_save(it.root)}"
    return None


def _others(it: _Directory) -> str | None:
    for what, marks, library in _MARKS:
        inside = {name for folder in it.folders[:64] for name in _names(it.path, folder)} if what == "Orbax" else set()
        inside |= {"saved_model.pb"} if any(".data-00000-of-" in name for name in it.files) else set()
        if not marks.isdisjoint(it.files | inside):
            return (
                f"is a checkpoint of {what}, which checkpointd does not import: load it with {library}, {_then_save(it.root)}"
            )
    return None


_MARKS: tuple[tuple[str, frozenset[str], str], ...] = (
    ("Orbax", frozenset({"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}), "orbax.checkpoint"),
    ("zarr", frozenset({".zarray", ".zgroup", ".zmetadata", "zarr.json"}), "zarr"),
    ("torchsnapshot", frozenset({".snapshot_metadata"}), "torchsnapshot"),
    ("TensorFlow", frozenset({"saved_model.pb"}), "TensorFlow"),
    ("Megatron", frozenset({"latest_checkpointed_iteration.txt"}), "Megatron"),
)


def _loose_weights(it: _Directory) -> str | None:
    """The advice for the first of the files of weights."""
    name = min((name for name in it.files if name.endswith(_WEIGHTS)), default=None)
    found = None if name is None else _file(os.path.join(it.path, name), it.root)
    return None if found is None else f"holds {name}, which {found}"


_DIRECTORIES: tuple[Callable[[_Directory], str | None], ...] = (
    _ours,
    _deepspeed,
    _dcp,
    _hugging_face,
    _others,
    _loose_weights,
)


def _names(path: str, name: str) -> Iterator[str]:
    try:
        with os.scandir(os.path.join(path, name)) as entries:
            yield from (entry.name for entry, _ in zip(entries, range(_ENTRIES_MAX), strict=False))
    except OSError:
        return


def _holds(path: str, name: str, ends: tuple[str, ...]) -> bool:
    return any(inside.endswith(ends) for inside in _names(path, name))


# --- files ------------------------------------------------------------------------------------------------------------


def _file(path: str, root: str) -> str | None:
    with open_regular(path) as file:
        head, size = file.read(_LOOK_BYTES), os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _LOOK_BYTES))
        tail = file.read(_LOOK_BYTES)
    above, name = os.path.split(path)
    if name in (".metadata", "latest") or name.endswith((_MODEL_STATES, _OPTIM_STATES, ".distcp")):
        found = recognised(above, root)
        return None if found is None else f"is one file of a checkpoint. The directory {found}"
    if name.endswith((".index.json", ".safetensors")) and above and (index := _hugging_face_index(above)):
        return f"is one file of weights in Hugging Face's form: load them with from_pretrained({index!r}), {_then_save(root)}"
    if head.startswith(b"PK\x03\x04"):
        return _zip(path, root, head, tail)
    if head.startswith(_LEGACY):
        return _torch_file(path, root, "is a file of torch.save in the form before torch 1.6")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return f"is a file of safetensors: load it with safetensors.torch.load_file({path!r}), {_then_save(root)}"
    for what, magic, advice in _MAGIC:
        if head.startswith(magic):
            return f"is {what}: {advice.format(then=_then_save(root), path=repr(path))}"
    if head[257:262] == b"ustar":
        return "is a tar archive: unpack it, and give what was in it"
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return f"is a pickle, which can run code when it is opened: open it only if you trust it, {_then_save(root)}"
    return None


_PACKED = "unpack it, and give what was in it"
_MAGIC = (
    ("a GGUF file", b"GGUF", "load it with transformers' from_pretrained(..., gguf_file={path}), {then}"),
    ("an HDF5 file, as Keras writes them", b"\x89HDF\r\n\x1a\n", "load it with Keras or h5py, {then}"),
    ("an array of numpy", b"\x93NUMPY", "load it with numpy.load({path}), {then}"),
    ("a pointer of Git LFS, not the file itself", b"version https://git-lfs", "fetch the file with `git lfs pull`"),
    ("compressed by gzip", b"\x1f\x8b", _PACKED),
    ("compressed by bzip2", b"BZh", _PACKED),
    ("compressed by xz", b"\xfd7zXZ\x00", _PACKED),
    ("compressed by zstd", b"\x28\xb5\x2f\xfd", _PACKED),
)


def _hugging_face_index(directory: str) -> str | None:
    with os.scandir(directory) as entries:
        found = any(e.name.endswith((".safetensors.index.json", ".bin.index.json")) for e in entries)
    return directory if found else None


def _zip(path: str, root: str, head: bytes, tail: bytes) -> str | None:
    """What a zip archive is, by its first entry and by the directory at its end; None if the end is missing."""
    if b"PK\x05\x06" not in tail:
        return None
    first = head[_ZIP_NAME : _ZIP_NAME + int.from_bytes(head[26:28], "little")]
    if first.endswith(b".npy"):
        return f"is an archive of numpy arrays: load it with numpy.load({path!r}), {_then_save(root)}"
    if b"/code/__torch__" in tail:
        return f"is a model of TorchScript: load it with torch.jit.load({path!r}), {_then_save(root)}"
    if b"/data.pkl" not in tail:
        return "is a zip archive: unpack it, and give what was in it"
    if _LIGHTNING in head:
        return (
            "is a checkpoint of Lightning: resume with trainer.fit(model, ckpt_path="
            f"{path!r}) and plugins=[CheckpointdIO()]; later checkpoints are checkpointd's"
        )
    return _torch_file(path, root, "is a file of torch.save")


def _torch_file(path: str, root: str, what: str) -> str:
    return f"{what}: load it as before, with torch.load({path!r}) and load_state_dict() of your objects, {_then_save(root)}"


def _then_save(root: str) -> str:
    return f"and save them with Checkpointer({root!r}).save(step, state)"
