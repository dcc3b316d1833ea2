"""How the roots in format-3/ were written: `python -m tests.golden.write_roots DIR` writes such roots into the new DIR.

After the first release the files in format-3/ stay as they are, since every later release must read them. Until then a change
of the format writes them again: write them into a new folder, and move its roots to format-3/. What stands in `expected/`
is a description of what was saved, made from the live values before they were handed over (`describe.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import difflib
import io
import json
import re
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from http import HTTPStatus
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID, SafeUUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpointd.admin.gc import collection
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import MIRROR, attempt_lease_key, read_back_name
from checkpointd.layout.log_records import DamageRecord, PassOverRecord, RollbackRecord, entry_key
from checkpointd.layout.manifest import Lease, Mirrored, ReadBack, encode
from checkpointd.mirror.mirroring import Mirroring, run_once
from checkpointd.pipeline import identity
from checkpointd.pipeline.read.verify import record_verdict, verify
from checkpointd.pipeline.root import leases, root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, Retention
from checkpointd_client.checkpointer import core_of
from tests.golden.describe import describe
from tests.unit.client import composite_tensors

CHUNK_BYTES = 4096
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")


class Model(nn.Module):
    """Tied weights, a buffer, a frozen parameter, and a tensor of several chunks whose last is not full."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 48)
        self.norm = nn.BatchNorm1d(48)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.head = nn.Linear(48, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return found


def trained(seed: int) -> tuple[Model, torch.optim.AdamW]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(37, (16,))).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


def values() -> dict[object, object]:
    """A value of every kind that a state tree knows."""
    return {
        "none": None,
        "flags": [True, False],
        "integers": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**200)],
        "floats": [0.5, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324],
        "text": ["", "plain", "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f600\0"],
        "bytes": [b"", bytes(range(256))],
        "complex": [1.5 - 2j, complex(-0.0, float("inf"))],
        "numpy scalars": [np.float32(1.5), np.int64(-7), np.bool_(True), np.complex64(1j), np.datetime64(12345, "ns")],
        "dicts": {
            "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
            "counter": collections.Counter("abracadabra"),
            "default": collections.defaultdict(list, {"x": [1]}),
            "empty": {},
        },
        "sequences": [[1, [2]], (3, (4,)), {5, "six"}, frozenset({7}), torch.Size([8, 9]), [], ()],
        "torch names": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.sparse_coo, torch.channels_last],
        "named": [HTTPStatus.OK, SafeUUID.safe, re.RegexFlag(0), re.ASCII | re.MULTILINE, difflib.Match(1, 2, 3)],
        "deques": [collections.deque([1, "two"]), collections.deque([3], maxlen=4)],
        "namespaces": [SimpleNamespace(a=1, b=SimpleNamespace()), argparse.Namespace(lr=0.5)],
        "library": library(),
        HTTPStatus.NOT_FOUND: "a member of an enum as a key",
        date(2026, 1, 1): "a date as a key",
        1: "one",
        -2.5: "a float as key",
        None: "none as key",
        ("a", (1, None)): "a tuple as key",
    }


def library() -> list[object]:
    """A value of every class of Python's library that a state tree knows."""
    noon, east = datetime(2026, 1, 1, 12, 30, 15, 7), timezone(timedelta(hours=5, minutes=45))
    buffer, text = io.BytesIO(b"bytes"), io.StringIO("text\r\n", newline="")
    buffer.seek(2)
    text.seek(3)
    return [
        *(Path("/a/b"), PurePosixPath("c"), PureWindowsPath("C:\\d")),
        *(noon, noon.replace(tzinfo=UTC), noon.replace(tzinfo=east), noon.replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=1)),
        *(noon.date(), noon.time(), noon.time().replace(tzinfo=UTC), timedelta(-1, 2, 3)),
        *(UTC, east, timezone(timedelta(seconds=-1), "before"), ZoneInfo("UTC")),
        *(UUID(int=5), UUID(int=6, is_safe=SafeUUID.unsafe), Decimal("1.10"), Decimal("sNaN"), Fraction(-1, 3)),
        *(slice(1, None, 2**70), range(0, 10, 3), bytearray(b"mutable"), buffer, text),
    ]


def tensors() -> dict[str, object]:
    """Tensors of many dtypes and of every shape that is not ordinary; memory that overlaps."""
    torch.manual_seed(5)
    base = torch.arange(20, dtype=torch.float32)
    matrix = torch.randn(6, 4)
    return {
        **{name: (torch.randn(7, 3) * 3).to(getattr(torch, name)) for name in DTYPES},
        "float8_e4m3fn": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(-0.0),
        "empty": torch.zeros(0, 4),
        "gradient": torch.randn(3, requires_grad=True),
        "matrix": matrix,
        "transposed": matrix.t(),
        "row of it": matrix[2],
        "strided": torch.arange(30).reshape(5, 6)[::2, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "overlapping": [base[:12], base[8:]],
        "nan payloads": torch.tensor([0x7FC00001, 0x7F800001, -1, 1, 0], dtype=torch.int32).view(torch.float32),
        "zeros": torch.zeros(1100),
        "ramp": torch.arange(600, dtype=torch.int64),
        "noise": torch.randn(2100, dtype=torch.bfloat16),
    }


def arrays() -> dict[str, object]:
    """numpy arrays: of a dtype that torch has too, and of those that are stored as bytes."""
    return {
        "float64": np.linspace(0, 1, 11),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.uint32).reshape(2, 3)),
        "big-endian": np.array([1.5, -2.5], dtype=">f8"),
        "times": np.array(["2026-01-01", "NaT"], dtype="<M8[ns]"),
        "text": np.array([["ab", "c"], ["", "d\u00e9f"]], dtype="<U3"),
        "scalar": np.array(3, dtype=np.int16),
        "empty": np.zeros((2, 0), dtype=np.complex128),
    }


def everything(seed: int = 1) -> dict[str, object]:
    model, optimizer = trained(seed)
    return {"model": model, "optimizer": optimizer, "values": values(), "tensors": tensors(), "arrays": arrays()}


CLIENT_STATE: dict[str, object] = {"epoch": 3, "loss": 0.25, "positions": torch.arange(4), "done": (1, 2)}


def named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The state of `optimizer` as it is stored: parameters have the names that they have in the state."""
    names = [f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = optimizer.state_dict()
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in found["param_groups"]]
    return {"state": {names[number]: value for number, value in found["state"].items()}, "param_groups": groups}


def keep(folder: Path, name: str, state: dict[str, object], client_state: dict[str, object] | None) -> None:
    model, optimizer = state.get("model"), state.get("optimizer")
    if isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
        state = {**state, "optimizer": named(model, optimizer)}
    found = json.dumps({"state": describe(state), "client_state": describe(client_state)}, separators=(",", ":"))
    (folder / "expected" / f"{name}.json").write_text(found.replace(',["', ',\n["') + "\n")


def write_solo(folder: Path, compression: str) -> None:
    state = everything()
    keep(folder, "solo", state, CLIENT_STATE)
    options = {"compression": compression, "chunk_bytes": CHUNK_BYTES, "dedup": False, "read_back": False}
    with Checkpointer(folder / f"solo-{compression}", **options) as ckpt:  # type: ignore[arg-type]
        ckpt.save(7, state, client_state=CLIENT_STATE).wait()


def write_as_rank(folder: Path, rank: int) -> None:
    """`best` twice, an aborted global_step2, and global_step3 without frozen parameters, which `latest` names."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, optimizer = trained(10 + rank)
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "rank": rank, "own": torch.full((rank + 1,), rank)}
    options = {"compression": "planes", "chunk_bytes": CHUNK_BYTES, "dedup": False, "read_back": False}
    with Checkpointer(folder / "two-ranks", **options) as ckpt:  # type: ignore[arg-type]
        ckpt.save(1, {"first": torch.zeros(3)}, tag="best").wait()
        keep(folder, f"two-ranks-best-{rank}", state, None)
        ckpt.save(1, state, tag="best").wait()
        try:
            ckpt.save(2, {**state, "refused": object()} if rank else state).wait()
        except CheckpointdError as error:
            print(f"rank {rank}: as intended: {error}")
        ckpt.save(3, state, client_state={"rank": rank}, exclude_frozen_parameters=True).wait()
        thawed = model.state_dict(keep_vars=True)
        del thawed["frozen.weight"], thawed["frozen.bias"]
        last = {**state, "model": thawed, "optimizer": named(model, optimizer)}
        keep(folder, f"two-ranks-global_step3-{rank}", last, {"rank": rank})
    write_own_part(folder, rank)
    torch.distributed.destroy_process_group()


def write_own_part(folder: Path, rank: int) -> None:
    """A tensor of a user's class on two ranks, each of which stores its own part of it, of 3 and of 2 rows."""
    state: dict[str, object] = {"weight": composite_tensors.per_row(rank)}
    keep(folder, f"own-parts-{rank}", state, None)
    options = {"compression": "none", "read_back": False, "tensor_classes": composite_tensors.OWN}
    with Checkpointer(folder / "own-parts", **options) as ckpt:  # type: ignore[arg-type]
        ckpt.save(1, state).wait()


def write_references(folder: Path) -> None:
    """global_step3 with a metric, verified, which refers to global_step1; this and global_step2 are gone.

    Beside it lies a record of reading back that is over, and the lease of a daemon that was killed.
    """
    model, optimizer = trained(20)
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    root = folder / "references"
    with Checkpointer(root, compression="none", chunk_bytes=CHUNK_BYTES, read_back=False) as ckpt:
        for step in (1, 2, 3):
            state["moving"] = torch.arange(2500, dtype=torch.float32) * step
            keep(folder, "references", state, None)
            ckpt.save(step, state, metrics={"loss": 1 / step}).wait()
    asyncio.run(record_verified(root))
    asyncio.run(leave_lease(root))
    asyncio.run(write_mirror(root, folder / "mirror"))


def write_history(folder: Path) -> None:
    """26 saves with retention, so that the log has a state; damage; a branch that a person left; and one that a load left."""
    root = folder / "history"
    options = {"compression": "none", "retention": 3}
    with Checkpointer(root, **options) as ckpt:  # type: ignore[arg-type]
        for step in range(1, 27):
            ckpt.save(step, {"step": step}).wait()
    asyncio.run(record_branches(root))
    with Checkpointer(root, compression="none", read_back=False) as ckpt:
        ckpt.load({}, tag="global_step24")
        ckpt.save(25, {"step": 25}).wait()


def write_rebuilt(folder: Path) -> None:
    """One save, after which an entry of the log was damaged; the next start has made the log again, and saved once more."""
    root = folder / "rebuilt"
    for step in (1, 2):
        with Checkpointer(root, compression="none", read_back=False) as ckpt:
            ckpt.save(step, {"step": step}).wait()
        if step == 1:
            (root / entry_key(2)).write_bytes(b"damaged")


def write_placed(folder: Path) -> None:
    """The state of an optimizer whose parameter is a DTensor, and which keeps tensors of another shape beside it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    numbers = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    weight = distribute_tensor(numbers, mesh, [Shard(0), Shard(1)]).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    optimizer.state[weight] = {
        "momentum": distribute_tensor(numbers / 8, mesh, [Shard(0), Shard(1)]),
        "rows": distribute_tensor(numbers[:, 0] / 4, mesh, [Shard(0), Replicate()]),
        "columns": distribute_tensor(numbers[0], mesh, [Replicate(), Shard(0)]),
    }
    state: dict[str, object] = {"optimizer": optimizer}
    keep(folder, "placed", state, None)
    with Checkpointer(folder / "placed", compression="none", read_back=False) as ckpt:
        ckpt.save(1, state).wait()
    torch.distributed.destroy_process_group()
    (folder / "meeting").unlink()


def write_tensor_kinds(folder: Path) -> None:
    """Composite tensors: those of torch itself, and two of a user's class with a context that has classes of its own."""
    kinds: dict[str, object] = {name: composite_tensors.made(name) for name in composite_tensors.KINDS}
    own = [composite_tensors.halves(), composite_tensors.halves(1).requires_grad_()]
    state = {"kinds": kinds, "own": own}
    keep(folder, "tensor-kinds", state, None)
    options = {"compression": "none", "read_back": False, "tensor_classes": composite_tensors.OWN}
    with Checkpointer(folder / "tensor-kinds", **options) as ckpt:  # type: ignore[arg-type]
        ckpt.save(1, state).wait()


def contents(fill: int) -> dict[str, object]:
    """What two files hold: tensors of several chunks, some of which share memory, and values."""
    weights = torch.arange(1500, dtype=torch.float32) * fill
    module = {"weight": weights, "bias": weights[:3], "half": torch.full((5,), fill).bfloat16(), "empty": torch.zeros(0, 2)}
    return {
        "mp_rank_00_model_states.pt": {"module": module, "global_steps": fill},
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {"step": torch.tensor(float(fill)), "betas": (0.9, 0.95)},
    }


def write_files(folder: Path) -> None:
    """global_step1 twice, of which the second is shown; and runs/last, which no `latest` names."""
    (folder / "files" / "runs").mkdir(parents=True)
    keep(folder, "files", {"global_step1": contents(2), "runs/last": contents(3)}, None)
    with Checkpointer(folder / "files" / ".checkpointd", chunk_bytes=CHUNK_BYTES, read_back=False) as ckpt:
        for fill in (1, 2):
            core_of(ckpt).save_files(1, contents(fill)).wait()
        core_of(ckpt).save_files(3, contents(3), tag="runs--last", at="runs/last", save_latest=False).wait()


async def record_verified(root: Path) -> None:
    async with PosixStore(root) as store:
        found = await root_view.find(store, "global_step3")
        await record_verdict(store, found, await verify(store, found, LoadConfig()))
        await collection(store, Retention(keep_last=1), dry_run=False)
        read = ReadBack(rank=0, nbytes=30_000, writer=identity.writer())
        await store.put(f"{found.prefix}/{read_back_name(0)}", encode(read))


async def record_branches(root: Path) -> None:
    async with PosixStore(root) as store:
        log = RootLog.of(store)
        *_, older, newest = root_view.checkpoints_of((await log.look()).attempts.values())[::-1]
        await log.add(PassOverRecord(attempt=newest.prefix, why="its index was damaged"))
        await log.add(DamageRecord(attempt=newest.prefix, why="a chunk is not what was written"))
        await log.add(RollbackRecord(attempt=older.prefix, user="alice (1000)", writer=identity.writer()))


async def leave_lease(root: Path) -> None:
    """What a daemon leaves that was killed between its commit and the removal of its lease."""
    lease = Lease(process=NOBODY, job="train", count=7, length_s=30.0, writer=identity.writer())
    async with PosixStore(root) as store:
        await store.put(attempt_lease_key("global_step3/00000001-0"), encode(lease))


class Elsewhere(PosixStore):
    """A store whose place is nobody's."""

    @property
    def url(self) -> str:
        return "/scratch/run1"


async def write_mirror(origin: Path, mirror: Path) -> None:
    """A mirror, and the record of a copy that it has begun beside."""
    async with Elsewhere(origin) as theirs, PosixStore(mirror) as ours:
        await run_once(Mirroring(theirs, ours), [])
        record = Mirrored(begun=("global_step4/00000001-0",), writer=identity.writer())
        await ours.put(MIRROR, encode(record))


NOBODY = "node7.000000000000.0.4711.0.00000000"


def anonymous() -> None:
    """Write as nobody, from nowhere: the files stay in the repository for ever."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for module, name, value in (
        (identity, "os", SimpleNamespace(getpid=lambda: 4711, geteuid=lambda: 65534)),
        (identity, "socket", SimpleNamespace(gethostname=lambda: "node7")),
        (identity, "datetime", SimpleNamespace(now=lambda _: noon)),
        (starts, "new_writer", lambda: NOBODY),
        (leases, "new_writer", lambda: NOBODY),
    ):
        setattr(module, name, value)


def main() -> None:
    """Write all roots, the ranks of the last one as processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    anonymous()
    folder = options.folder.absolute()
    if options.rank is not None:
        write_as_rank(folder, options.rank)
        return
    (folder / "expected").mkdir(parents=True)
    for compression in ("none", "zstd", "planes"):
        write_solo(folder, compression)
    write_references(folder)
    write_files(folder)
    write_placed(folder)
    write_tensor_kinds(folder)
    write_history(folder)
    write_rebuilt(folder)
    program = [sys.executable, "-m", "tests.golden.write_roots", str(folder), "--rank"]
    ranks = [subprocess.Popen([*program, str(rank)]) for rank in range(2)]
    if any(rank.wait() for rank in ranks):
        raise SystemExit("a rank failed")
    (folder / "meeting").unlink(missing_ok=True)
    for name in ("lock", "ballast"):  # no part of the format
        for own in folder.rglob(f".checkpointd/{name}"):
            own.unlink()


if __name__ == "__main__":
    main()
