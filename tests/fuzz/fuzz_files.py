"""A mutational fuzzer of what lies on the disk: `python -m tests.fuzz.fuzz_files COUNT [--seed N]`.

Each input is a copy of a real root, or of what DeepSpeed saved by itself, with a change: bits, lengths, objects that change
places or go, or, with digests forged all the way up, other fields in an index, a vote or a commit. It is loaded in a child of
bounded memory. Stops with the seed where an outcome is none of OUTCOMES: wrong values in silence, another exception than ours,
an object that a failed load has touched, a hang, or memory that grows.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from checkpointd.cli import program
from checkpointd.errors import CheckpointdError, PartlyLoadedError
from checkpointd.layout.ballot import encode_ballot
from checkpointd.layout.manifest import digest
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.integrations.deepspeed.offline import safe_unpickle
from checkpointd_client.integrations.deepspeed.offline.fp32 import get_fp32_state_dict_from_zero_checkpoint
from checkpointd_client.integrations.deepspeed.offline.importing import import_deepspeed
from tests import every_object
from tests.every_object import client_state, values
from tests.forged_roots import opened, sealed
from tests.fuzz.corpus import STAGES, STEPS, make
from tests.unit.client.unpickling import zips

OUTCOMES = ("newest", "older, and said", "refused", "forged", "whole", "damage found", "read")
HANG_S = 120
CASE_S = 60
RETRY_S = 2.0
"""How long a load tries what cannot be read: a pipe in the place of an object stays one."""
MEMORY_BYTES = 2 << 30
ROOTS = ("planes", "zstd", "none", "ranks")
ZEROS = tuple(f"zero{stage}" for stage in STAGES)
EVERY = "every object"
"""The root that has every kind of object."""
KINDS = (*ROOTS, EVERY, EVERY, "forged", "forged", "files", *(f"shown{stage}" for stage in STAGES), "pickle", *ZEROS)
"""In the corpus: roots of tensors, roots that show DeepSpeed's files, and files that DeepSpeed saved by itself."""
SPARSE_BYTES = (1 << 28, 1 << 40)
Mutation = Callable[[random.Random, Path], None]


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in values(0).items()}


# --- mutations ----------------------------------------------------------------------------------------------------------


def _objects(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name not in ("ballast", "lock"))


def _one(source: random.Random, root: Path) -> Path:
    """An object, twice in three times one of the newest checkpoint."""
    found = _objects(root)
    newest = [path for path in found if f"global_step{steps_of(root)[-1]}" in str(path)]
    return source.choice(newest if newest and source.random() < 2 / 3 else found)


def steps_of(root: Path) -> list[int]:
    """The steps of its checkpoints, oldest first."""
    is_every = (root / "best").is_dir()
    return sorted(every_object.STEPS.values()) if is_every else list(STEPS)


def flip(source: random.Random, root: Path) -> None:
    path = _one(source, root)
    data = bytearray(path.read_bytes())
    for _ in range(source.choice((1, 1, 2, 8)) if data else 0):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    _write(path, bytes(data))


def overwrite(source: random.Random, root: Path) -> None:
    path = _one(source, root)
    data = bytearray(path.read_bytes())
    at, size = source.randrange(len(data) + 1), source.randint(1, 1 + len(data) // 3)
    data[at : at + size] = source.choice((bytes(size), source.randbytes(size), b"\xff" * size))[: len(data) - at]
    _write(path, bytes(data))


def cut(source: random.Random, root: Path) -> None:
    path = _one(source, root)
    size = path.stat().st_size
    _write(path, path.read_bytes()[: source.choice((0, 1, size // 2, max(0, size - 1), source.randint(0, size)))])


def extend(source: random.Random, root: Path) -> None:
    path = _one(source, root)
    _write(path, path.read_bytes() + source.choice((b"\0", bytes(4096), source.randbytes(99), path.read_bytes()[:999])))


def sparse(source: random.Random, root: Path) -> None:
    path = _one(source, root)
    _write(path, path.read_bytes())
    os.truncate(path, source.choice(SPARSE_BYTES))


def swap(source: random.Random, root: Path) -> None:
    one, other = _one(source, root), _one(source, root)
    first, second = one.read_bytes(), other.read_bytes()
    _write(one, second)
    _write(other, first)


def remove(source: random.Random, root: Path) -> None:
    _one(source, root).unlink()


def link(source: random.Random, root: Path) -> None:
    path, other = _one(source, root), _one(source, root)
    path.unlink()
    path.symlink_to(source.choice((str(other), "/dev/zero", "/nonexistent", path.name, "/")))


def pipe(source: random.Random, root: Path) -> None:
    path = _one(source, root)
    path.unlink()
    os.mkfifo(path)


def lose(source: random.Random, root: Path) -> None:
    """A directory, but not the root itself: what is not there cannot say that it was."""
    folder = _one(source, root).parent
    shutil.rmtree(folder if folder != root else source.choice(sorted(path for path in root.iterdir() if path.is_dir())))


def _write(path: Path, data: bytes) -> None:
    """Into a new file: what is shown may be linked to an object."""
    path.unlink()
    path.write_bytes(data)


PLAIN: tuple[Mutation, ...] = (flip, flip, flip, overwrite, cut, extend, sparse, swap, remove, link, pipe, lose)
LOSSES: tuple[Mutation, ...] = (remove, lose, cut)
NUMBERS = (0, 1, -1, 63, 4096, 1 << 31, 1 << 40, (1 << 62), -(1 << 62))
TEXTS = (
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "float32",
    "bool",
    "raw",
    "zstd",
    "planes",
    "commit",
    "abort",
    "global_step1",
)


def other(source: random.Random, value: Any) -> Any:
    """`value` with one place changed."""
    if isinstance(value, dict) and value:
        key = source.choice(list(value))
        return (
            {k: v for k, v in value.items() if k != key} if source.random() < 0.1 else {**value, key: other(source, value[key])}
        )
    if isinstance(value, list) and value:
        at, kind = source.randrange(len(value)), source.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return [*value, value[at]]
        return [*value[:at], other(source, value[at]), *value[at + 1 :]]
    if isinstance(value, bool) or value is None:
        return source.choice((True, False, None, 0, "", []))
    if isinstance(value, int):
        return source.choice((*NUMBERS, value + 1, value - 1, value * 2, float(value), str(value)))
    if isinstance(value, str):
        return source.choice((*TEXTS, value + "x", value[:-1], value * 2, None, 5))
    return source.choice((b"", b"\0", None, 5, "x"))


def forge(source: random.Random, root: Path) -> None:
    """Other fields, under digests that fit."""
    [attempt] = (root / source.choice(("global_step3", "global_step3", "global_step1"))).iterdir()
    name = source.choice(("plan", "index", "tree", "vote", "commit"))
    entry, fields = _commit_of(root, f"{attempt.parent.name}/{attempt.name}")
    commit = next(record for record in fields["records"] if record["kind"] == "commit")
    if name == "commit":
        changed = other(source, commit)
        fields["records"] = [changed if record is commit else record for record in fields["records"]]
    else:
        votes = [path.read_bytes() for path in sorted(attempt.glob("*.vote"))]
        rank = source.randrange(len(votes))
        votes[rank] = _forged_vote(source, attempt / f"{rank:05d}.index", opened(votes[rank]), name)
        (attempt / f"{rank:05d}.vote").write_bytes(votes[rank])
        ref, ballot = encode_ballot(votes)
        (attempt / f"ballot-{ref.digest}").write_bytes(ballot)
        commit["ballot"] = {"digest": ref.digest, "size": ref.size}
    entry.write_bytes(sealed(fields))


def _commit_of(root: Path, attempt: str) -> tuple[Path, dict[str, Any]]:
    """The entry of the log that commits `attempt`, and its fields."""
    for path in sorted(root.glob("log/*.json")):
        fields = opened(path.read_bytes())
        if ("commit", attempt) in [(record["kind"], record.get("attempt")) for record in fields["records"]]:
            return path, fields
    raise AssertionError(f"no entry commits {attempt}")


def _forged_vote(source: random.Random, index: Path, vote: dict[str, Any], name: str) -> bytes:
    """Another vote, or one that names an index in which the part `name` is another one."""
    if name == "vote":
        return sealed(other(source, vote))
    data, size = index.read_bytes(), vote["index"]["plan"]["size"]
    plan, content = msgspec.msgpack.decode(data[:size]), msgspec.msgpack.decode(data[size:])
    if name == "plan":
        plan = other(source, plan)
    elif name == "index":
        content = other(source, content)
    else:
        content["tree"] = msgspec.msgpack.encode(other(source, msgspec.msgpack.decode(content["tree"])))
    listed = msgspec.msgpack.encode(plan)
    data = listed + msgspec.msgpack.encode(content)
    index.write_bytes(data)
    ref = {"size": len(listed), "digest": digest(listed)}
    vote["index"] = {**vote["index"], "size": len(data), "digest": digest(data), "plan": ref}
    return sealed(vote)


def in_pickle(source: random.Random, folder: Path) -> None:
    """Other bytes in the pickle of a zip file that is right."""
    path = source.choice(sorted(folder.rglob("*.pt")))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            changed = bytearray(data)
            if name.endswith("data.pkl"):
                for _ in range(source.choice((1, 2, 8))):
                    at = source.randrange(len(changed))
                    kind = source.random()
                    if kind < 0.5:
                        changed[at] = source.randrange(256)
                    elif kind < 0.75:
                        changed[at:at] = source.choice(
                            (b"2", b"0", b"(", b"t", b"R", b"b", b"}", b"\x86", b"h\x01", b"cos\nsystem\n")
                        )
                    else:
                        del changed[at : at + source.randint(1, 9)]
            archive.writestr(name, bytes(changed))
    path.write_bytes(made.getvalue())


def in_archive(source: random.Random, folder: Path) -> None:
    """An archive that programs read in different ways, sometimes with other bytes in its directory."""
    path = source.choice(sorted(folder.rglob("*.pt")))
    data = bytearray(source.choice(zips.AMBIGUOUS)(path.read_bytes()))
    if source.random() < 0.5:
        with zipfile.ZipFile(path) as archive:
            start = archive.start_dir
        data[source.randrange(min(start, len(data) - 1), len(data))] = source.randrange(256)
    path.write_bytes(bytes(data))


# --- outcomes -----------------------------------------------------------------------------------------------------------


class Said(logging.Handler):
    """What the log says is wrong."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def loaded(root: Path, steps: Sequence[int], *, is_forged: bool) -> str:
    """The outcome of a start and a load, and of what the log says; `verify` after it finds why a load was refused.

    `steps`: those of the root's checkpoints.
    """
    said, model, refused = Said(), blank(), ""
    log = logging.getLogger("checkpointd")
    log.handlers[:], log.propagate = [said], False
    try:
        with Checkpointer(root, absence_s=0.02, commit_timeout_s=RETRY_S) as ckpt:
            found = ckpt.load({"model": model})
    except CheckpointdError as error:
        # Partly: what cannot be read was met after other bytes were in the objects, or the load had no time to fill the rest.
        partly = isinstance(error, PartlyLoadedError)
        assert partly or same(model, blank()), "a load that failed has touched the objects in silence"
        found, refused = None, repr(error)
    is_whole = program.run(["verify", str(root)]) == 0
    if refused:
        assert is_forged or not is_whole, f"verify says that all is whole, and a load {refused}"
        return "refused"
    if found is None:
        assert is_forged, "nothing was loaded in silence"
        return "forged"
    right = found.step in steps and same(model, values(found.step)) and found.client_state == client_state(found.step)
    if not right:
        assert is_forged, f"wrong values of step {found.step}"
        return "forged"
    if found.step == steps[-1]:
        return "newest"
    assert is_forged or found.fell_back_from or said.lines, f"step {found.step} in silence"
    return "older, and said"


def same(model: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(model[name], value) for name, value in wanted.items())


def verified(root: Path, original: Path) -> str:
    """Of files: what is in plain sight is what was saved, or is named; and `verify` finds every change in what is stored."""
    log = logging.getLogger("checkpointd")
    log.handlers[:], log.propagate = [Said()], False
    outcome = "whole"
    try:
        with Checkpointer(root / ".checkpointd", absence_s=0.02, commit_timeout_s=RETRY_S) as ckpt:
            checkpoints, removed = core_of(ckpt).checkpoints(), core_of(ckpt).removed()
            for checkpoint in checkpoints:
                if checkpoint.prefix in removed or core_of(ckpt).damage(checkpoint, range(checkpoint.commit.world_size)):
                    continue
                for path in (original / checkpoint.tag).glob("*.pt"):
                    shown = root / path.relative_to(original)
                    assert shown.read_bytes() == path.read_bytes(), f"{shown} is another one, and nothing was said"
    except CheckpointdError:
        outcome = "refused"
    if program.run(["verify", str(root / ".checkpointd")]) != 0:
        return "damage found"
    for path in (original / ".checkpointd").glob("global_step*/*/*"):
        now = root / path.relative_to(original)
        if (path.suffix in (".chunks", ".file", ".index") or path.name.startswith(("ballot-", "plan-"))) and now.is_file():
            # A sparse file may be longer than the memory.
            is_same = now.stat().st_size == path.stat().st_size and now.read_bytes() == path.read_bytes()
            assert is_same, f"{path.name} is another one, and verify says nothing"
    return outcome


def unpickled(folder: Path) -> str:
    """The check and the reader are one: what torch and Python's zipfile see in other ways is refused."""
    before, load = set(os.listdir(folder)), torch.load
    torch.load = _not_called
    try:
        safe_unpickle.read(str(folder / "a.pt"))
    except CheckpointdError:
        return "refused"
    finally:
        torch.load = load
        assert set(os.listdir(folder)) == before
    return "read"


def _not_called(*_: object, **__: object) -> None:
    raise AssertionError("torch.load has the file of a stranger")


def imported(root: Path, original: Path, mutation: Mutation) -> str:
    """Of what DeepSpeed saved, which has no digests: what is read is whole, and complete where a file is gone or cut."""
    made = root.with_name("made")
    shutil.rmtree(made, ignore_errors=True)
    try:
        weights = get_fp32_state_dict_from_zero_checkpoint(root)
        import_deepspeed(root, made, leave_out=True)
    except CheckpointdError:
        return "refused"
    assert program.run(["verify", str(made)]) == 0, "what was imported is damaged"
    if mutation in LOSSES:
        wanted = get_fp32_state_dict_from_zero_checkpoint(original)
        assert weights.keys() == wanted.keys(), f"imported {sorted(weights)}"
        assert same(weights, wanted), "wrong weights after a file was lost"
    return "read"


def one(seed: int, corpus: Path, scratch: Path) -> tuple[str, str]:
    """The kind of one input, and its outcome."""
    source = random.Random(seed)
    kind = source.choice(KINDS)
    original = corpus / (source.choice(ROOTS) if kind == "forged" else kind)
    root = scratch / "root"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(original, root)
    is_pickled = kind == "pickle" or kind in ZEROS
    choices = {"forged": (forge,), "pickle": (in_pickle, in_pickle, in_archive, in_archive, flip, cut)}
    mutation = source.choice(choices.get(kind, (in_pickle, in_archive, *PLAIN) if is_pickled else PLAIN))
    mutation(source, root)
    kind += f" {mutation.__name__}"
    if original.name == "pickle":
        return kind, unpickled(root)
    if is_pickled:
        return kind, imported(root, original, mutation)
    if (original / ".checkpointd" / "latest").is_file():
        return kind, verified(root, original)
    return kind, loaded(root, steps_of(original), is_forged=mutation is forge)


# --- running ------------------------------------------------------------------------------------------------------------


def _hung(*_: object) -> None:
    raise TimeoutError(f"it hangs: {CASE_S} s have passed")


def work(seeds: range, corpus: Path) -> None:
    """In the child: each outcome on a line of its own, as it comes."""
    out = os.fdopen(os.dup(1), "w")
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    signal.signal(signal.SIGALRM, _hung)
    torch.set_num_threads(1)
    for module in [m for name, m in sys.modules.items() if name.startswith("checkpointd.") and hasattr(m, "ABSENCE_S")]:
        vars(module)["ABSENCE_S"] = 0.02
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            signal.alarm(CASE_S)
            kind = ""
            try:
                kind, outcome = one(seed, corpus, Path(scratch))
            except BaseException:
                outcome = traceback.format_exc()
            signal.alarm(0)
            print(json.dumps([seed, kind, outcome]), file=out, flush=True)


@contextmanager
def corpora() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        yield Path(folder)


def fuzz(seeds: range, corpus: Path) -> Counter[tuple[str, str]]:
    """How often each outcome came of each kind of input; AssertionError with the seed of one that may not be."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.fuzz_files",
        str(len(seeds)),
        "--seed",
        str(seeds.start),
        "--corpus",
        str(corpus),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=HANG_S + 2 * len(seeds), check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [(seed, outcome) for seed, _, outcome in found if outcome not in OUTCOMES]
    assert not bad, f"seed {bad[0][0]}: {bad[0][1]}"
    assert len(found) == len(seeds), f"seed {seeds.start + len(found)} ended the child ({done.returncode})"
    return Counter((kind, outcome) for _, kind, outcome in found)


def sum_of_outcomes(found: Counter[tuple[str, str]]) -> Counter[str]:
    """The same of all kinds together."""
    total: Counter[str] = Counter()
    for (_, outcome), count in found.items():
        total[outcome] += count
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--corpus", type=Path, help="where the originals lie: this is the child")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.corpus is not None:
        work(seeds, arguments.corpus)
        return
    found: Counter[tuple[str, str]] = Counter()
    with corpora() as corpus:
        for start in range(seeds.start, seeds.stop, 200):
            found += fuzz(range(start, min(start + 200, seeds.stop)), corpus)
            print(dict(sum_of_outcomes(found)), flush=True)
        for (kind, outcome), count in sorted(found.items()):
            print(f"{count:6} {kind}: {outcome}")


if __name__ == "__main__":
    main()
