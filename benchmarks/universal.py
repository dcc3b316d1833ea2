"""What it takes to resume a DeepSpeed job on another number of ranks: DeepSpeed's universal path, and checkpointd's.

    python benchmarks/universal.py --write

A trial: two ranks save one engine both ways; then each is loaded into engines on three ranks, by fresh processes, the page
cache dropped before. DeepSpeed's path is `save_checkpoint`, `ds_to_universal` and `load_checkpoint` with `load_universal`;
ours is `save_checkpoint` and `load_checkpoint` with layout="checkpointd". The fp32 masters that the loaded engines have are
compared with those that were saved, bit for bit. Needs deepspeed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path[0] = str(REPOSITORY)

from benchmarks import disk, document, report  # noqa: E402
from benchmarks.zero import layers_of  # noqa: E402

WIDTH = 1024
SAVED_ON, LOADED_ON = 2, 3
STEPS = 2
TAG = f"global_step{STEPS}"
STOCK, UNIVERSAL, OURS = f"stock/{TAG}", f"stock/{TAG}_universal", f"ours/{TAG}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Both ways at one stage, once: seconds of the slowest rank; bytes on disk; `equal`: the masters are those saved."""

    stage: int
    run: int
    stock_save_s: float
    convert_s: float
    universal_load_s: float
    universal_equal: bool
    stock_bytes: int
    universal_bytes: int
    own_call_s: float
    own_committed_s: float
    own_load_s: float
    own_equal: bool
    own_bytes: int


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.25, help="state of all ranks together (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--stages", default="1,3", help="(default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--write", action="store_true", help="write benchmarks/UNIVERSAL.md")
    parser.add_argument("--rank-of", nargs=3, metavar=("ACT", "STAGE", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.rank_of:
        act, stage, folder = options.rank_of
        rank_of(act, int(stage), Path(folder), layers_of(options.gib))
        return 0
    found: list[Trial] = []
    for run in range(options.runs):
        for stage in map(int, options.stages.split(",")):
            found.append(trial(options, stage, run))
            print(json.dumps(asdict(found[-1])), flush=True)
    text = page(options, found)
    print(text)
    if options.write:
        (HERE / "UNIVERSAL.md").write_text(text)
    return 0 if all(one.own_equal for one in found) else 1


def trial(options: argparse.Namespace, stage: int, run: int) -> Trial:
    folder = Path(tempfile.mkdtemp(prefix="checkpointd-universal-", dir=options.dir))
    try:
        said = launch(options, "save", stage, folder, SAVED_ON)
        said["convert_s"] = convert(folder)
        disk.drop(folder)
        said |= launch(options, "universal", stage, folder, LOADED_ON)
        disk.drop(folder)
        said |= launch(options, "own", stage, folder, LOADED_ON)
        sizes = {"stock_bytes": STOCK, "universal_bytes": UNIVERSAL, "own_bytes": OURS}
        said |= {name: disk.size(folder / place) for name, place in sizes.items()}
    finally:
        shutil.rmtree(folder)
        os.sync()  # the freed blocks are discarded now, and not during the next trial
    return Trial(stage=stage, run=run, **said)


def launch(options: argparse.Namespace, act: str, stage: int, folder: Path, ranks: int) -> dict[str, Any]:
    """One job; of each figure the slowest rank's, and what is true of all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--gib", str(options.gib), "--rank-of", act, str(stage), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False)
    files = sorted(folder.glob(f"{act}-*.json"))
    if len(files) != ranks:
        raise RuntimeError(f"the ranks of {act} at stage {stage} failed ({done.returncode}):\n{done.stdout[-6000:]}")
    said = [json.loads(file.read_text()) for file in files]
    return {name: (min if name.endswith("equal") else max)(one[name] for one in said) for name in said[0]}


def convert(folder: Path) -> float:
    """Seconds that DeepSpeed's tool takes, with as many workers as there are cores."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--num_extract_workers", str(os.cpu_count()), "--num_merge_workers", str(os.cpu_count())]
    command += ["--input_folder", str(folder / STOCK), "--output_folder", str(folder / UNIVERSAL)]
    began = time.perf_counter()
    subprocess.run(command, env={**os.environ, "DS_ACCELERATOR": "cpu"}, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


# --- inside a job ---------------------------------------------------------------------------------------------------


def rank_of(act: str, stage: int, folder: Path, layers: int) -> None:
    """One rank: it notes what it saw in the folder."""
    import torch
    import torch.distributed as dist

    from checkpointd_client.integrations.deepspeed import attach

    torch.set_num_threads(1)
    engine = make(stage, layers, universal=act == "universal")
    if act == "save":
        for step in range(STEPS):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(1, WIDTH).bfloat16()).float().square().mean())
            engine.step()
        torch.save(masters(engine), folder / f"masters-{dist.get_rank()}.pt")
        said: dict[str, Any] = {"stock_save_s": timed(lambda: engine.save_checkpoint(str(folder / "stock")))}
        plug = attach(engine, layout="checkpointd")
        said["own_call_s"] = timed(lambda: engine.save_checkpoint(str(folder / "ours")))
        assert plug.handle is not None
        plug.handle.wait()
        said["own_committed_s"] = plug.handle.timings.committed_s
    else:
        if act == "universal":
            load_s = timed(lambda: engine.load_checkpoint(str(folder / "stock"), tag=f"{TAG}_universal"))
        else:
            attach(engine, layout="checkpointd")
            load_s = timed(lambda: engine.load_checkpoint(str(folder / "ours")))
        saved, loaded = torch.load(folder / "masters-0.pt"), masters(engine)
        equal = saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
        said = {f"{act}_load_s": load_s, f"{act}_equal": equal}
    (folder / f"{act}-{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)  # DeepSpeed's atexit hooks wait for ranks that have left


def make(stage: int, layers: int, *, universal: bool) -> Any:
    """A bf16 engine."""
    import deepspeed
    import deepspeed.comm.comm
    import torch

    # It would be compiled for a minute, and is not needed: gloo does the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def masters(engine: Any) -> dict[str, Any]:
    """The fp32 masters, whole, by name: DeepSpeed's own view of them."""
    import deepspeed

    return {name: deepspeed.utils.safe_get_full_fp32_param(p).cpu() for name, p in engine.module.named_parameters()}


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# --- the page -------------------------------------------------------------------------------------------------------


def page(options: argparse.Namespace, found: list[Trial]) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(options.dir).items())
    head = ["ZeRO, way", "save, s", "convert, s", "load, s", "save to loaded, s", "on disk, MiB", "masters equal"]
    rows = []
    for stage in sorted({one.stage for one in found}):
        these = [one for one in found if one.stage == stage]
        rows.append(
            [
                f"{stage}, DeepSpeed's universal path",
                *(
                    str(report.spread(getattr(one, name) for one in these))
                    for name in ("stock_save_s", "convert_s", "universal_load_s")
                ),
                str(report.spread(one.stock_save_s + one.convert_s + one.universal_load_s for one in these)),
                str(report.spread((one.stock_bytes + one.universal_bytes) / (1 << 20) for one in these)),
                "yes" if all(one.universal_equal for one in these) else "no",
            ]
        )
        rows.append(
            [
                f"{stage}, checkpointd, own format",
                str(report.spread(one.own_committed_s for one in these)),
                "none",
                str(report.spread(one.own_load_s for one in these)),
                str(report.spread(one.own_committed_s + one.own_load_s for one in these)),
                str(report.spread(one.own_bytes / (1 << 20) for one in these)),
                "yes" if all(one.own_equal for one in these) else "no",
            ]
        )
    call = report.spread(one.own_call_s for one in found)
    return f"""# Resuming on another number of ranks

This page compares ways to resume a DeepSpeed job on another number of ranks: time and disk space.
`python benchmarks/universal.py --gib {options.gib:g} --runs {options.runs} --write` writes it; do not edit it by hand.

Machine: {facts}.

A bf16 model with fp32 masters and AdamW, {options.gib:g} GiB of state together, saved on {SAVED_ON} ranks and loaded on
{LOADED_ON} (gloo); {options.runs} runs; the slowest rank; the median, and in brackets the smallest and the largest. *save*:
for DeepSpeed the call, which makes nothing durable; for checkpointd the time until the commit, which is durable (its call took
{call} s).
*convert*: `ds_to_universal`, as a process, with a worker for each core. *load*: with the page cache dropped. *on disk*:
DeepSpeed's files and the converted ones, both needed while it converts. *masters equal*: the fp32 masters after the load equal
the saved ones, bit for bit.

{report.table(head, rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
