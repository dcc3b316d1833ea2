"""Train twice, once undisturbed and once with a rank killed in the middle of a save, and compare the results bit for bit.

    python examples/demo/demo.py
    python examples/demo/demo.py --root s3                     # against SeaweedFS, which it starts for itself
    python examples/demo/demo.py --root "s3://bucket/path?endpoint=http://127.0.0.1:9000"

Everything is real: two gloo ranks under torchrun, a GPT of some ten million parameters, SIGKILL, the store as the kill left it.
Ends with 1 where any bit differs, where no save could be hit while it was being written, and where an upload was left behind.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

import tables
from checkpointd.bucket_urls import parse
from checkpointd.errors import UsageError
from compare import Comparison, compare_runs
from costs import SaveCost, read_saves, step_seconds
from launch import Job, Strike, kill_during_save
from places import Bucket, Directory, Place
from seaweed import seaweed
from second_act import SecondAct

HERE = Path(__file__).resolve().parent
RANKS = 2
VICTIM = 1


class Demo:
    """One demonstration in an empty folder of its own, with the logs `interrupted/` and `reference/`. The checkpoints lie below
    `root`, the URL of an empty place in a bucket, or else in that folder.
    """

    def __init__(self, folder: Path, root: str | None, options: argparse.Namespace, console: Console) -> None:
        self.folder, self.options, self.console = folder, options, console
        self.ours, self.reference = folder / "interrupted", folder / "reference"
        self.place, self.second = (place_of(root, part, folder) for part in ("first", "second"))
        self.root = self.place.root

    def run(self) -> bool:
        """Whether a rank was killed in the middle of a save, and the result equals the uninterrupted run's."""
        self.console.print(
            f"{RANKS} gloo ranks train a byte-level GPT ({self.options.layers} layers, width {self.options.width}) on the "
            f"sources of Python's standard library, for {self.options.steps} steps."
        )
        self.heading("1. The reference: an undisturbed run without a single checkpoint")
        self.train_undisturbed()
        self.heading(f"2. The same run, saving every {self.options.save_every} steps; rank {VICTIM} is killed during a save")
        strike = self.train_and_kill()
        self.heading("3. Are the two runs equal, bit for bit?")
        comparisons = compare_runs(self.ours, self.reference, ranks=RANKS)
        self.console.print(tables.comparison(comparisons))
        self.heading("4. What saving cost")
        self.show_costs(strike)
        self.heading("5. The checkpoints")
        self.show_checkpoints(strike)
        good = self.verdict(strike, comparisons, self.place.uploads())
        self.heading("6. The second act: all trainers die once their snapshots are whole, and the sidecar finishes the save")
        return self.second_act() and good

    def second_act(self) -> bool:
        """Whether the save was committed without trainers, and the restarts went on exactly as the reference did."""
        act = SecondAct(self.folder / "second", self.second, self.job, self.console, save_every=self.options.save_every)
        recoveries = act.run()
        self.console.print(tables.recoveries(recoveries))
        self.console.print(tables.RECOVERIES_EXPLAINED)
        wrong = [step for recovery in recoveries for step in recovery.differing(self.reference)]
        if wrong:
            self.console.print(f"\n[bold red]FAILED:[/] the losses of steps {wrong} differ from the uninterrupted run's.")
        return not wrong and [recovery.source for recovery in recoveries] == ["memory", "store"]

    def heading(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]")

    def train_undisturbed(self) -> None:
        never = self.options.steps + 1
        with self.job(self.reference, "--save-every", str(never), "--root", str(self.folder / "unused")) as job:
            self.follow(job)

    def train_and_kill(self) -> Strike | None:
        every = self.options.save_every
        tags = [f"global_step{step}" for step in range(every - 1, self.options.steps, every)]
        saving = ["--save-every", str(every), "--root", self.root, "--compression", self.options.compression]
        # The job ends first, whatever happens here: the watcher then has nothing more to wait for.
        with ThreadPoolExecutor(1) as executor, self.job(self.ours, *saving, restarts=3) as job:
            watcher = executor.submit(self.strike, job, tags[2:-1])
            self.follow(job)
            return watcher.result()

    def strike(self, job: Job, tags: Sequence[str]) -> Strike | None:
        strike = kill_during_save(job, self.place, tags, rank=VICTIM, after=self.place.strike_after)
        if strike is not None:
            self.console.print(tables.strike(strike))
        return strike

    def job(self, out: Path, *arguments: str, restarts: int = 0) -> Job:
        shape = ["--layers", str(self.options.layers), "--width", str(self.options.width), "--device", self.options.device]
        length = ["--steps", str(self.options.steps), "--batch", "6", "--print-every", "4", "--out", str(out)]
        errors = self.folder / f"{out.name}.stderr"
        return Job(HERE / "train_gpt.py", [*shape, *length, *arguments], errors=errors, restarts=restarts)

    def follow(self, job: Job) -> None:
        started = time.monotonic()
        for line in job:
            self.console.print(f"  [dim]{time.monotonic() - started:5.1f} s[/]  {line}")

    def show_costs(self, strike: Strike | None) -> None:
        saves = read_saves(self.ours, ranks=RANKS)
        self.console.print(tables.costs(saves, strike, self.measure_blocking()))
        self.console.print(tables.COSTS_EXPLAINED)
        if requests := tables.requests(saves):
            self.console.print(requests)
        beside, others = step_seconds(self.ours, ranks=RANKS, save_every=self.options.save_every)
        self.console.print(
            f"Median step with a save beside it: {beside * 1e3:.0f} ms, call and writing on the same cores included; "
            f"other steps: {others * 1e3:.0f} ms."
        )

    def measure_blocking(self) -> list[SaveCost]:
        """torch.save of the newest checkpoint's state, on both ranks at once, with nothing else running."""
        shape = ["--layers", str(self.options.layers), "--width", str(self.options.width)]
        arguments = ["--root", self.root, "--folder", str(self.folder), *shape]
        with Job(HERE / "blocking.py", arguments, errors=self.folder / "blocking.stderr") as job:
            rounds = [json.loads(line) for line in job]
        return [SaveCost(call_s=r["held_s"], durable_s=r["durable_s"]) for r in rounds]

    def show_checkpoints(self, strike: Strike | None) -> None:
        self.checkpointd("list", self.root)
        if strike is not None:
            self.checkpointd("explain", self.root, strike.tag)

    def checkpointd(self, *arguments: str) -> None:
        """Run the command line as a user would, and show the command."""
        self.console.print(f"$ {shlex.join(['checkpointd', *arguments])}", soft_wrap=True)
        command = Path(sys.executable).with_name("checkpointd")
        subprocess.run([command, *arguments], check=True)

    def verdict(self, strike: Strike | None, comparisons: Sequence[Comparison], left: Sequence[str]) -> bool:
        different = sum(len(comparison.different) for comparison in comparisons)
        if different:
            self.console.print(f"\n[bold red]FAILED:[/] {different} values differ from the uninterrupted run's.")
        if strike is None:
            self.console.print(
                "\n[bold red]FAILED:[/] every save was over before it could be hit, so nothing was shown. "
                "Make the state larger: --width or --layers."
            )
        if left:
            self.console.print(f"\n[bold red]FAILED:[/] the killed rank's uploads are still there: {', '.join(left)}.")
        return not different and strike is not None and not left


def main() -> int:
    options = parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the running job on the way out
    # Piped output has no width of its own; a fixed one keeps the tables readable in a log.
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    started = time.monotonic()
    folder = empty_folder(options.folder)
    with bucket_root(options.root, folder, keep=options.keep) as root:
        good = Demo(folder, root, options, console).run()
    if good:
        console.print(
            f"\n[bold green]Equal, bit for bit.[/] Rank {VICTIM} was killed in the middle of a save, torchrun restarted the "
            "job, and it resumed from the newest committed checkpoint. With the sidecar, all trainers were killed, their save "
            "was committed all the same, and the restart loaded from memory. Nobody had to help. "
            f"{time.monotonic() - started:.0f} s in all."
        )
    if good and not options.keep:
        shutil.rmtree(folder)
    else:
        console.print(f"Everything is still in {folder}", soft_wrap=True)
    return 0 if good else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=HERE.parents[1] / "build" / "demo", help="where to work; some GB are needed"
    )
    parser.add_argument(
        "--root",
        metavar="s3|URL",
        help="save to a bucket: `s3` starts SeaweedFS in the folder; or the s3:// URL of yours",
    )
    parser.add_argument("--keep", action="store_true", help="leave the folder for a closer look")
    parser.add_argument("--device", default="cpu", help="or a kind of accelerator, if there are two of them")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=4, help="steps")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--compression", choices=["auto", "none", "zstd", "planes"], default="auto")
    options = parser.parse_args()
    if options.root not in (None, "s3"):
        if not options.root.startswith("s3://"):
            parser.error(f"--root {options.root}: give `s3`, or a URL such as s3://bucket/path?endpoint=http://127.0.0.1:9000")
        try:
            parse(options.root)
        except UsageError as error:
            parser.error(str(error))
    return options


@contextmanager
def bucket_root(given: str | None, folder: Path, *, keep: bool) -> Iterator[str | None]:
    """The URL of an empty place in a bucket: of SeaweedFS, which runs meanwhile, or below the URL `given`, where it is removed
    afterwards unless `keep`. None without one.
    """
    if given == "s3":
        with seaweed(folder / "seaweedfs") as root:
            yield root
    elif given is None:
        yield None
    else:
        root = parse(given).below(f"checkpointd-demo-{secrets.token_hex(4)}").url
        try:
            yield root
        finally:
            if not keep:
                Bucket(root).clear()


def place_of(root: str | None, part: str, folder: Path) -> Place:
    """Where the checkpoints of a part of the demonstration lie."""
    if root is not None:
        return Bucket(parse(root).below(part).url)
    return Directory(folder / "checkpoints" if part == "first" else folder / part / "checkpoints")


def empty_folder(folder: Path) -> Path:
    """Make `folder`; what an earlier demo left there goes, and anything else is refused."""
    mark = folder / ".checkpointd-demo"
    if mark.exists():
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} holds files that no demo left there: name an empty folder with --folder")
    folder.mkdir(parents=True)
    mark.touch()
    return folder


if __name__ == "__main__":
    sys.exit(main())
