"""DeepSpeed's own checkpoint tests as a judge: run with its stock saving, and with checkpointd's in both layouts.

    git clone https://github.com/deepspeedai/DeepSpeed /path/to/DeepSpeed
    pip install 'pytest<8.4' huggingface_hub deepspeed
    python benchmarks/deepspeed_suite.py /path/to/DeepSpeed

Its tests/ are copied and run on the CPU, against the DeepSpeed of the same tree (in a tree with tests/ alone: the one that is
installed, which must be of the same version). Nothing is written to the tree. The first start compiles two of its optimizers,
which takes minutes and needs g++ and ninja; they are kept in TORCH_EXTENSIONS_DIR.
Every engine that a test makes is attached to checkpointd, unchanged otherwise. A test that is stuck is ended and counts as
failed. `--runs 3` tells flaky tests from failing ones. Ends with exit status 1 where the stock engine passes a test in
every run, and checkpointd in none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import deepspeed_suite_worker as worker  # noqa: E402

SYSTEMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "deepspeed": {"layout": "deepspeed"},
    "deepspeed-synchronous": {"layout": "deepspeed", "synchronous": True},
    "checkpointd": {"layout": "checkpointd"},
    "checkpointd-synchronous": {"layout": "checkpointd", "synchronous": True},
}
"""The options that engines are attached with; None: they are not."""
LOOK_S = 0.5
SERVED = """
try:
    from benchmarks.deepspeed_suite_worker import serve

    serve()
except ImportError as error:  # which the server would pass over in silence, and run everything with stock saving
    raise RuntimeError(f"the test processes cannot be prepared: {error}") from error
"""


@dataclass(frozen=True)
class Result:
    """One test, once. `outcome`: passed, failed or skipped."""

    system: str
    run: int
    file: str
    test: str
    outcome: str
    why: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="a source tree of DeepSpeed, or a directory with its tests/")
    parser.add_argument("--systems", default="stock,deepspeed,checkpointd", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--files", default="", help="names of files in tests/unit/checkpoint, by commas (default: all)")
    parser.add_argument("--select", default="", help="pytest's -k")
    parser.add_argument("--runs", type=int, default=1, help="how often (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="how many devices the CPU says it is (default: %(default)s)")
    parser.add_argument("--stuck-after", type=int, default=200, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what pytest says goes there")
    parser.add_argument("--json", type=Path, help="keep all results there, one a line")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="checkpointd-suite-") as scratch:
        folder = Path(scratch)
        prepare(options.tree.resolve(), folder)
        compile_optimizers(folder, options)
        for run in range(options.runs):
            for file in files_of(folder, options.files):
                for system in options.systems.split(","):
                    found += run_file(folder, file, system, run, options)
                    keep(found, options.json)
                    print(line_of(found, system, run, file), flush=True)
    print(report(found, options))
    return 1 if worse(found) else 0


def prepare(tree: Path, folder: Path) -> None:
    """What the tests see as their source tree."""
    shutil.copytree(tree / "tests", folder / "tests")
    if (tree / "deepspeed").is_dir():
        shutil.copy(tree / "version.txt", folder / "tests")  # read from where the tests run
    (folder / f"{worker.SERVED}.py").write_text(SERVED)


def files_of(folder: Path, names: str) -> list[str]:
    wanted = set(names.split(",")) if names else None
    every = sorted(path.name for path in (folder / "tests/unit/checkpoint").glob("test_*.py"))
    return [name for name in every if wanted is None or name in wanted]


def run_file(folder: Path, file: str, system: str, run: int, options: argparse.Namespace) -> list[Result]:
    """All tests of one file. Pytest is started again as long as a test that is stuck ends it."""
    results = folder / f"{file}-{system}-{run}.jsonl"
    before = -1
    while before < len(seen := worker.read(results)):
        before = len(seen)
        if not _run_pytest(folder, file, system, results, options):
            break
    return list(_results(worker.read(results), system, run, file))


def environment_of(folder: Path, system: str, results: Path, options: argparse.Namespace) -> dict[str, str]:
    chosen = SYSTEMS[system]
    path = [folder, folder / "tests", REPOSITORY, REPOSITORY / "client", options.tree.resolve()]
    return {
        **os.environ,
        worker.SYSTEM: "stock" if chosen is None else json.dumps(chosen),
        worker.RESULTS: str(results),
        "PYTHONPATH": os.pathsep.join(map(str, path)),  # the tree last: it has benchmarks of its own
        "PYTHONDONTWRITEBYTECODE": "1",
        "DS_ACCELERATOR": "cpu",
        "DS_UNITTEST_TIMEOUT": str(options.stuck_after),
        "LOCAL_SIZE": str(options.ranks),
        "OMP_NUM_THREADS": "1",
    }


def compile_optimizers(folder: Path, options: argparse.Namespace) -> None:
    """Before any test has a limit."""
    environment = environment_of(folder, "stock", folder / "none.jsonl", options)
    subprocess.run([sys.executable, "-c", f"import {worker.SERVED}"], env=environment, cwd=folder / "tests", check=True)


def _run_pytest(folder: Path, file: str, system: str, results: Path, options: argparse.Namespace) -> bool:
    """Whether there may be more tests: it was ended, or ended itself, in the middle of one."""
    environment = environment_of(folder, system, results, options)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.deepspeed_suite_worker", "-p", "no:cacheprovider"]
    command += [
        f"unit/checkpoint/{file}",
        "--basetemp",
        str(folder / "basetemp"),
        *(["-k", options.select] if options.select else []),
    ]
    with options.log.open("a") as log:
        process = subprocess.Popen(
            command, cwd=folder / "tests", env=environment, stdout=log, stderr=log, start_new_session=True
        )
    _wait(process, results, options.stuck_after + 30)
    lines = worker.read(results)
    return bool(lines) and lines[-1]["outcome"] == "begun"


def _wait(process: subprocess.Popen[bytes], results: Path, patience_s: float) -> None:
    """Until it has ended; it and all that it started are killed once no test has begun or ended for `patience_s`."""
    size, since = -1, time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - since < patience_s:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
            now = results.stat().st_size if results.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _results(lines: Iterable[dict[str, Any]], system: str, run: int, file: str) -> Iterator[Result]:
    """The last line of each test counts; one that has only begun was stuck."""
    last: dict[str, dict[str, Any]] = {}
    for line in lines:
        if last.get(line["test"], {}).get("outcome") != "failed":  # a failed call stays failed
            last[line["test"]] = line
    for test, line in last.items():
        stuck = line["outcome"] == "begun"
        yield Result(system, run, file, test, "failed" if stuck else line["outcome"], "it was stuck" if stuck else line["why"])


def keep(found: list[Result], path: Path | None) -> None:
    if path is not None:
        path.write_text("".join(json.dumps(vars(one)) + "\n" for one in found))


# --- the report --------------------------------------------------------------------------------------------------


def count(found: Iterable[Result]) -> str:
    """Passed, failed and skipped."""
    outcomes = [one.outcome for one in found]
    return " / ".join(str(outcomes.count(name)) for name in ("passed", "failed", "skipped"))


def line_of(found: list[Result], system: str, run: int, file: str) -> str:
    these = [one for one in found if (one.system, one.run, one.file) == (system, run, file)]
    failed = "".join(
        f"\n    failed: {one.test}\n        {one.why.strip().replace(chr(10), ' ')[-300:]}"
        for one in these
        if one.outcome == "failed"
    )
    return f"run {run}, {system}, {file}: {count(these)} (passed / failed / skipped){failed}"


def worse(found: list[Result]) -> dict[str, list[str]]:
    """By system, the tests that the stock engine passes in every run, and this one in none."""
    outcomes: dict[tuple[str, str], set[str]] = {}
    for one in found:
        outcomes.setdefault((one.system, one.test), set()).add(one.outcome)
    reliable = [test for (system, test), those in outcomes.items() if system == "stock" and those == {"passed"}]
    systems = {one.system for one in found} - {"stock"}
    bad = {
        system: [test for test in reliable if "passed" not in outcomes.get((system, test), {"passed"})] for system in systems
    }
    return {system: tests for system, tests in sorted(bad.items()) if tests}


def report(found: list[Result], options: argparse.Namespace) -> str:
    """A table in Markdown: passed / failed / skipped of all runs together, by file and system."""
    systems = options.systems.split(",")
    rows = [["file", *systems], [":---", *("---:" for _ in systems)]]
    for file in [*dict.fromkeys(one.file for one in found), "all"]:
        these = [one for one in found if file in (one.file, "all")]
        rows.append([file, *(count(one for one in these if one.system == system) for system in systems)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    bad = "\n".join(f"- {system}: `{test}`" for system, tests in worse(found).items() for test in tests)
    return (
        f"\n{versions(options.tree)}; {options.runs} runs, {options.ranks} devices. Passed / failed / skipped:\n\n{table}\n\n"
        f"Tests that the stock engine passes in every run, and another in none:\n\n{bad or 'None.'}"
    )


def versions(tree: Path) -> str:
    def of(package: str) -> str:
        return importlib.metadata.version(package)

    own = (tree / "deepspeed").is_dir()
    file = tree / "version.txt"
    tests = file.read_text().strip() if file.exists() else "an unknown version"
    return f"DeepSpeed {tests if own else of('deepspeed')}, tests of {tests}, torch {of('torch')}"


if __name__ == "__main__":
    sys.exit(main())
