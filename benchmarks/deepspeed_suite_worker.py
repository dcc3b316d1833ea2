"""What runs inside DeepSpeed's tests: a pytest plugin, and what every test process imports before it begins.

`deepspeed_suite.py` loads it by `-p`; the server from which DeepSpeed's test processes are forked imports it too, and so
attaches their engines. Settings come from the environment, since nothing else reaches those processes.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEM = "CHECKPOINTD_SUITE_SYSTEM"
"""`stock`, or the options of attach() as JSON."""
RESULTS = "CHECKPOINTD_SUITE_RESULTS"
"""The file that gets a line of JSON for the beginning and for the end of each test."""
SERVED = "checkpointd_suite_served"


def pytest_configure() -> None:
    """Test processes come from a server that has imported DeepSpeed once."""
    multiprocessing.set_forkserver_preload([SERVED])


def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Those that have an outcome already are left out."""
    del session, config
    seen = {line["test"] for line in read(Path(os.environ[RESULTS]))}
    items[:] = [item for item in items if item.nodeid not in seen]


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, "begun", "")


def pytest_runtest_logreport(report: Any) -> None:
    """The call counts; of set-up and tear-down only what went wrong or was skipped."""
    if report.when == "call" or report.outcome != "passed":
        _note(report.nodeid, str(report.outcome), str(report.longrepr or ""), report.duration)


def _note(test: str, outcome: str, why: str, seconds: float = 0.0) -> None:
    with Path(os.environ[RESULTS]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why[-20_000:], "seconds": seconds}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def serve() -> None:
    """Import DeepSpeed and let its engines go through the system under test."""
    import deepspeed
    import deepspeed.comm.comm

    # It would be compiled for a minute, and is not needed: gloo does the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    # Stage 3 of 0.19.6 starts several and waits for the last alone. With gloo the others may come later: its tests fail now and
    # then, whoever saves. 0.19.8 waits for all.
    deepspeed.comm.all_gather_into_tensor = _waited_for(deepspeed.comm.all_gather_into_tensor)
    for name in ("FusedAdamBuilder", "CPUAdamBuilder"):  # compiled or found once, and not by every process
        deepspeed.accelerator.get_accelerator().create_op_builder(name).load()
    system = os.environ[SYSTEM]
    if system != "stock":
        deepspeed.initialize = _attaching(deepspeed.initialize, json.loads(system))


def _attaching(initialize: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    from checkpointd_client.integrations.deepspeed import attach

    @functools.wraps(initialize)
    def attached(*args: Any, **kwargs: Any) -> Any:
        made = initialize(*args, **kwargs)
        attach(made[0], **options)
        return made

    return attached


def _waited_for(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def all_gather_into_tensor(*args: Any, **kwargs: Any) -> Any:
        handle = start(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    return all_gather_into_tensor
