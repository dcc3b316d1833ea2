"""How many bytes ranks read for the bytes they need, where the layout that saved is another one than that which loads.

    python benchmarks/amplification.py --write

The tensors are those of a layer of a transformer, its embedding and its norms, bf16 and fp32, at the default chunk size. Who
writes which box, how boxes are cut into chunks, which chunks a load reads and in which groups: that is the code that saves and
loads. Only the bytes are left out, so that models of real sizes take seconds. What is told is the sum over all ranks that load:
bytes read over bytes of the boxes that they hold.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from checkpointd.config import LoadConfig, PersistConfig
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.indexes import Chunk, Index, TensorEntry
from checkpointd.layout.keys import AttemptId, chunks_name
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import BallotRef, ObjectRef, WriterIdentity
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.chunks import group_chunks
from checkpointd.pipeline.read.plan import BoxRequest, plan_reads
from checkpointd.pipeline.shard import ShardTensor
from checkpointd.pipeline.write.split import split
from checkpointd.store.base import Capabilities
from checkpointd_client.sharding.dtensor import Axis, LocalBox, LocalShard, MeshLayout, _parts, rows_of
from checkpointd_client.sharding.write_split import written_parts

HERE = Path(__file__).resolve().parent
GAP_BYTES = Capabilities(alignment=1, shared=True).gap_bytes
ATTEMPT = AttemptId(1, 0)
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a model; `tp`: the dimension that tensor parallelism splits, None where all of its ranks hold the whole."""

    fqn: str
    shape: tuple[int, ...]
    tp: int | None
    dtype: str = "bfloat16"


def model(
    width: int = 4096, inner: int = 14336, vocabulary: int = 32000, dtypes: Iterable[str] = ("bfloat16", "float32")
) -> list[Tensor]:
    """One layer of a transformer, its embedding and norms, in each of `dtypes`."""
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "embedding": ((vocabulary, width), 0),
        "attention.query": ((width, width), 0),
        "attention.key": ((width // 4, width), 0),
        "attention.value": ((width // 4, width), 0),
        "attention.out": ((width, width), 1),
        "mlp.gate": ((inner, width), 0),
        "mlp.up": ((inner, width), 0),
        "mlp.down": ((width, inner), 1),
        "norm1": ((width,), None),
        "norm2": ((width,), None),
    }
    return [Tensor(f"{dtype}.{fqn}", shape, tp, dtype) for dtype in dtypes for fqn, (shape, tp) in shapes.items()]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How ranks lay out a model: `ddp`, `fsdp` (Shard(0)), `hsdp` (two groups of it), `tp` (and FSDP over `count / tp`)."""

    kind: str
    count: int
    tp: int = 1

    def __str__(self) -> str:
        return f"{self.kind}({self.count})" if self.kind != "tp" else f"tp({self.tp}) x fsdp({self.count // self.tp})"

    @property
    def mesh(self) -> tuple[int, ...]:
        """The sizes of its mesh, the dimension that shards or is tensor-parallel last."""
        return {"hsdp": (2, self.count // 2), "tp": (self.count // self.tp, self.tp)}.get(self.kind, (self.count,))

    def axes(self, tensor: Tensor) -> tuple[Axis | None, ...]:
        """What each dimension of the mesh does to `tensor`."""
        if self.kind == "tp":
            pieces = self.tp if tensor.tp == 0 else 1
            return (Axis(0, pieces), None if tensor.tp is None else Axis(tensor.tp))
        return {"ddp": (None,), "hsdp": (None, Axis(0))}.get(self.kind, (Axis(0),))

    def held(self, tensor: Tensor, rank: int) -> LocalShard:
        """What `rank` holds of `tensor`."""
        at = tuple(rank // math.prod(self.mesh[dim + 1 :]) % size for dim, size in enumerate(self.mesh))
        axes = self.axes(tensor)
        rows = rows_of(MeshLayout(tensor.shape, self.mesh, axes), at)
        replica, replicas = 0, 1
        for size, index, axis in zip(self.mesh, at, axes, strict=True):
            if axis is None:
                replica, replicas = replica * size + index, replicas * size
        return LocalShard(tensor.shape, _parts(tensor.shape, rows), replica, replicas)


def saved(tensors: Iterable[Tensor], ranks: Ranks, chunk_bytes: int) -> CheckpointView:
    """The checkpoint that `ranks` make of `tensors`, without its bytes."""
    known = list(tensors)
    indexes = {rank: _index(list(_written(known, ranks, rank)), rank, ranks.count, chunk_bytes) for rank in range(ranks.count)}
    commit = CommitRecord(
        attempt=f"tag/{ATTEMPT}",
        n=0,
        step=1,
        world_size=ranks.count,
        ballot=BallotRef(digest="", size=1),
        decided_by=0,
        writer=WriterIdentity(host="", pid=0, time=""),
    )
    return CheckpointView(LoggedAttempt.of(commit), indexes)


def _written(tensors: Iterable[Tensor], ranks: Ranks, rank: int) -> Iterator[ShardTensor]:
    offset = 0
    for tensor in tensors:
        item = ITEM_BYTES[tensor.dtype]
        for part in written_parts(tensor.fqn, ranks.held(tensor, rank), item):
            nbytes = part.box.numel() * item
            yield ShardTensor(tensor.fqn, tensor.dtype, part.shape, part.box, "global", offset, nbytes, item)
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT


def _index(tensors: list[ShardTensor], rank: int, world_size: int, chunk_bytes: int) -> Index:
    def chunks(tensor: ShardTensor) -> tuple[Chunk, ...]:
        return tuple(Chunk(0, s.offset, s.nbytes, s.nbytes, "raw", None, bytes(16)) for s in split([tensor], chunk_bytes))

    return Index(
        tag="tag",
        attempt=str(ATTEMPT),
        rank=rank,
        world_size=world_size,
        step=1,
        objects=(ObjectRef(name=chunks_name(rank, 0), size=sum(t.nbytes + ALIGNMENT for t in tensors)),),
        tensors=tuple(TensorEntry(t.fqn, t.dtype, t.shape, t.box, "global", chunks(t)) for t in tensors),
        aliases=(),
        excluded=(),
        tree=b"\xc0",
    )


def amplification(
    world: CheckpointView, tensors: Iterable[Tensor], ranks: Ranks, config: LoadConfig | None = None
) -> tuple[float, float]:
    """Bytes read over bytes needed, of all `ranks` that load `world` together, and of the worst of them."""
    known, found = list(tensors), []
    for rank in range(ranks.count):
        held = [(tensor, part) for tensor in known for part in ranks.held(tensor, rank).parts]
        gaps, wanted = plan_reads(world, [BoxRequest(tensor.fqn, part.box, None) for tensor, part in held])
        assert not gaps, gaps
        groups = group_chunks(wanted, (config or LoadConfig()).block_bytes, GAP_BYTES)
        read = sum(group.stop - group.start for group in groups)
        found.append((read, _needed(held)))
    return sum(r for r, _ in found) / sum(n for _, n in found), max(r / n for r, n in found if n)


def _needed(held: Iterable[tuple[Tensor, LocalBox]]) -> int:
    return sum(part.box.numel() * ITEM_BYTES[tensor.dtype] for tensor, part in held)


ALIGNED = [
    (Ranks("ddp", 8), Ranks("ddp", 2)),
    (Ranks("ddp", 8), Ranks("fsdp", 8)),
    (Ranks("fsdp", 4), Ranks("fsdp", 4)),
    (Ranks("fsdp", 4), Ranks("fsdp", 8)),
    (Ranks("fsdp", 4), Ranks("fsdp", 2)),
    (Ranks("fsdp", 4), Ranks("ddp", 3)),
    (Ranks("fsdp", 8), Ranks("fsdp", 64)),
    (Ranks("hsdp", 8), Ranks("fsdp", 4)),
    (Ranks("tp", 8, 2), Ranks("ddp", 1)),
    (Ranks("tp", 8, 2), Ranks("tp", 4, 2)),
]
"""One is a part of the other, along dimension 0: every box of the one holds, or lies in, whole boxes of the other."""
MISALIGNED = [
    (Ranks("fsdp", 4), Ranks("fsdp", 3)),
    (Ranks("fsdp", 3), Ranks("fsdp", 4)),
    (Ranks("fsdp", 8), Ranks("fsdp", 7)),
    (Ranks("ddp", 8), Ranks("fsdp", 3)),
    (Ranks("fsdp", 64), Ranks("fsdp", 48)),
    (Ranks("fsdp", 8), Ranks("fsdp", 1000)),
    (Ranks("tp", 8, 2), Ranks("fsdp", 3)),
    (Ranks("tp", 8, 8), Ranks("fsdp", 8)),
    (Ranks("fsdp", 8), Ranks("tp", 8, 2)),
    (Ranks("fsdp", 8), Ranks("tp", 8, 4)),
    (Ranks("fsdp", 8), Ranks("tp", 8, 8)),
    (Ranks("tp", 8, 2), Ranks("tp", 8, 8)),
]


def many_small(count: int = 2000) -> list[Tensor]:
    """A model of many small tensors: 6 KiB to 128 KiB each."""
    shapes = [(768,), (64, 768), (3, 1024), (128, 256)]
    return [Tensor(f"t{n}", shapes[n % len(shapes)], 0 if n % 4 else None) for n in range(count)]


def rows(pairs: Iterable[tuple[Ranks, Ranks]], tensors: list[Tensor]) -> list[list[str]]:
    """One line for each pair."""
    made, chunk_bytes = [], PersistConfig().chunk_bytes
    for source, target in pairs:
        total, worst = amplification(saved(tensors, source, chunk_bytes), tensors, target)
        made.append([f"{source} to {target}", f"{total:.2f}", f"{worst:.2f}"])
        print(*made[-1], flush=True)
    return made


def page() -> str:
    """The measurement as a page."""
    head = ["saved by, loaded by", "read / needed", "of the worst rank"]
    large, small = model(), many_small()
    return f"""# Read amplification

This page shows how many bytes a load reads for each byte that it needs, if the layout that loads differs from the layout that
saved. `python benchmarks/amplification.py --write` writes it; do not edit it by hand.

The figures are the bytes that all ranks read over the bytes that they need, at the default chunk size (4 MiB). The model is a
layer of a transformer of width 4096, its embedding (32,000 x 4096) and its norms, bf16 and fp32. These are counts, not times:
chunks and reads are those of the code that saves and loads. `fsdp` is `Shard(0)`, `hsdp` two groups of it, and `ddp` has whole
tensors.

## Aligned: each box of one layout consists of whole boxes of the other

{report.table(head, rows(ALIGNED, large))}

## Misaligned

{report.table(head, rows(MISALIGNED, large))}

A chunk is read whole, since only whole chunks can be verified. A sharded or replicated tensor is cut into chunks of whole rows,
each a sixteenth of the box, between 256 KiB and 4 MiB. So reading a part of it along dimension 0 costs little more than the
part.

Weights that were saved by rows and are loaded by columns (`attention.out` and `mlp.down` under tensor parallelism) cost most:
every chunk of whole rows contains a part of every column. So a box of whole rows of at least 4 MiB is written as two boxes, its
left and its right half. Each of T ranks then reads T/2 times the bytes that it needs of such a tensor.

Only parts that are much smaller than a chunk stay above 2, as from 8 ranks to 1000.

## Many small tensors

2,000 tensors of 1.5 KiB to 96 KiB, bf16.

{report.table(head, rows([*ALIGNED[:6], *MISALIGNED[:4]], small))}

A small tensor is one chunk, so a rank that needs a part of it reads all of it. Chunks at most 64 KiB apart are read in one
call, together with the bytes between them. So a change of layout costs such a model more bytes, and fewer calls.
"""


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write AMPLIFICATION.md")
    text = page()
    if parser.parse_args().write:
        (HERE / "AMPLIFICATION.md").write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
