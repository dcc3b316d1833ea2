"""One rank of a job whose DeepSpeed optimizer steps in a process of its own.

    torchrun --nproc-per-node=2 deepspeed_offload_ranks.py FOLDER

Every rank notes what is wrong in each case: see `rank_cases.py`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

from checkpointd.errors import CheckpointdError, StateError
from checkpointd_client.integrations.deepspeed import attach
from checkpointd_client.integrations.deepspeed.zero_optimizer import bundles_of
from checkpointd_client.staging import stager
from tests.e2e.deepspeed_engines import Findings, Kind, train
from tests.e2e.deepspeed_offload_engines import end, make, process, superoffload, zenflow
from tests.e2e.deepspeed_ranks import same
from tests.e2e.rank_cases import leave_process_group

LAYOUTS = ("deepspeed", "checkpointd")
KINDS: dict[str, Callable[[], Any]] = {
    "superoffload": superoffload,
    "superoffload, clipped": functools.partial(superoffload, clipped=True),
    "superoffload, fp32": functools.partial(superoffload, "float32"),
    "zenflow 1, overlapped": functools.partial(zenflow, 1, overlap=True),
    "zenflow 2": functools.partial(zenflow, 2, overlap=False),
    "zenflow 3, overlapped": functools.partial(zenflow, 3, overlap=True),
}
SAVED, END = 5, 9
LIMIT_S = 300.0


@contextmanager
def copied_late() -> Iterator[None]:
    """Snapshots are copied when something waits for them, and otherwise only at the end of the block."""
    go, finish = threading.Event(), stager.Staging.finish

    def late(self: stager.Staging) -> None:
        if threading.current_thread().name == "checkpointd-stager":
            go.wait(LIMIT_S)
        finish(self)

    with patch.object(stager.Staging, "finish", late), patch.object(stager, "AT_ONCE_BYTES", 0):
        try:
            yield
        finally:
            go.set()


def weights(engine: Any) -> list[torch.Tensor]:
    """Copies of the weights and masters that this rank holds."""
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    return [one.detach().clone() for one in [*held, *(bundle.tensor for bundle in bundles_of(engine))]]


class Rank(Findings):
    def resumes_as_deepspeed_does(self, name: str) -> None:
        """What was saved in each layout continues like what DeepSpeed saved at the same moment."""
        folder = self.folder / name.replace(", ", "-")
        for layout in LAYOUTS:
            engine = make(KINDS[name]())
            plug = attach(engine, layout=layout)
            train(engine, 0, 1)
            engine.save_checkpoint(str(folder / f"first-{layout}"))  # DeepSpeed moves the masters at a later step
            train(engine, 1, SAVED)
            self.check(plug._process.fault(LIMIT_S) is None, "the process is idle")
            plug.detach()
            stock, ours = folder / f"stock-{layout}", folder / layout
            engine.save_checkpoint(str(stock), client_state={"epoch": 3})
            saved = weights(engine)
            plug = attach(engine, layout=layout)
            with copied_late():
                engine.save_checkpoint(str(ours), client_state={"epoch": 3})
                train(engine, SAVED, END)
            handle = engine.checkpoint_handle()
            handle.wait(LIMIT_S)
            self.check(handle.phase == "committed", f"{layout}: {handle}")
            if layout == "deepspeed":
                self.same_files(stock, ours)
            end(engine)
            # Each layout has a stock of its own: at a new selection ZenFlow writes the masters while its process may step them.
            expected, found = self.resumed(name, stock, None), self.resumed(name, ours, layout)
            if layout == "checkpointd":
                self.check(all(map(torch.equal, found[0], saved)), "the loaded weights are not those that were saved")
            if layout == "deepspeed" or not name.startswith("zenflow 3"):  # whose own load takes the weights from the masters
                self.check(all(map(torch.equal, found[0], expected[0])), f"{layout}: other weights than DeepSpeed's load gives")
                self.check(
                    found[1] == expected[1], f"{layout}: other losses than after DeepSpeed's load: {found[1]} {expected[1]}"
                )

    def resumed(self, name: str, root: Path, layout: Any) -> tuple[list[torch.Tensor], list[float]]:
        """The loaded weights, and the losses of the next steps, in a new engine."""
        engine = make(KINDS[name](), seed=1)
        if layout is not None:
            attach(engine, layout=layout)
        path, client = engine.load_checkpoint(str(root))
        self.check(path is not None and client["epoch"] == 3, f"loaded {path} {client}")
        loaded, losses = weights(engine), train(engine, SAVED, END)
        end(engine)
        return loaded, losses

    def same_files(self, stock: Path, ours: Path) -> None:
        for one in sorted(stock.glob("*/*_states.pt")) if dist.get_rank() == 0 else ():
            content = [torch.load(path, weights_only=False) for path in (one, ours / one.relative_to(stock))]
            self.check(same(*content), f"{one.name} holds something else than DeepSpeed's")

    def refuses_the_moment_between_backward_and_step(self, layout: Any) -> None:
        """The process has then begun a step that `step()` may still take back."""
        root, engine = str(self.folder / f"moment-{layout}"), make(superoffload())
        attach(engine, layout=layout)
        engine.save_checkpoint(root, tag="good", client_state={"epoch": 3})
        engine.backward(engine(torch.ones(2, 8, dtype=torch.int64)))
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            self.raises_everywhere(lambda call=call: call(root), "call it after engine.step()")
        engine.step()
        engine.save_checkpoint(root, tag="better")
        engine.checkpoint_handle().wait(LIMIT_S)
        end(engine)

    def raises_everywhere(self, call: Callable[[], Any], words: str) -> None:
        try:
            call()
        except StateError as error:
            self.check(words in str(error), f"the error is {error}")
        except Exception as error:
            self.wrong.append(f"the error is {error!r}")
        else:
            self.wrong.append("nothing was raised")

    def names_a_process_that_died(self, layout: Any) -> None:
        """ZenFlow's process of one rank dies within a step: every rank says so at once, and the last checkpoint stays."""
        root, engine = self.folder / f"died-{layout}", make(zenflow(1, overlap=True))
        attach(engine, layout=layout)
        train(engine, 0, SAVED)
        engine.save_checkpoint(str(root), tag="good", client_state={"epoch": 3})
        engine.checkpoint_handle().wait(LIMIT_S)
        if self.is_last:
            os.kill(process(engine).pid, signal.SIGSTOP)
        train(engine, SAVED, SAVED + 1)
        if self.is_last:
            process(engine).kill()
            process(engine).join()
        self.raises_everywhere(lambda: engine.save_checkpoint(str(root)), "on rank 1: ZenFlow's optimizer process has died")
        self.check(os.listdir(root).count("good") == 1, "the last checkpoint stays")
        end(engine)
        again = make(zenflow(1, overlap=True), seed=1)
        attach(again, layout=layout)
        self.check("good" in str(again.load_checkpoint(str(root))[0]), "it can be loaded")
        end(again)

    @property
    def is_last(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1

    def needs_no_process_after_a_step(self, layout: Any) -> None:
        """SuperOffload's process has died between two steps: nothing is missing from a save."""
        root, engine = self.folder / f"idle-{layout}", make(superoffload())
        attach(engine, layout=layout)
        train(engine, 0, 2)
        process(engine).kill()
        process(engine).join()
        saved = weights(engine)
        engine.save_checkpoint(str(root))
        engine.checkpoint_handle().wait(LIMIT_S)
        end(engine)
        again = make(superoffload(), seed=1)
        attach(again, layout=layout)
        again.load_checkpoint(str(root))
        self.check(all(map(torch.equal, weights(again), saved)), "other weights than the saved ones")
        end(again)

    def loads_while_zenflow_is_stepping(self, layout: Any) -> None:
        """The step that was given before the load ends before it, and its result is not put in place afterwards."""
        root, engine = str(self.folder / f"stepping-{layout}"), make(zenflow(1, overlap=True))
        attach(engine, layout=layout)
        train(engine, 0, SAVED)
        engine.save_checkpoint(root)
        saved = weights(engine)
        train(engine, SAVED, END)
        engine.load_checkpoint(root)
        self.check(all(map(torch.equal, weights(engine), saved)), "the load is complete")
        stale = engine.optimizer.single_partition_of_fp32_groups[0].stale_param
        self.check(torch.equal(stale, bundles_of(engine)[0].tensor), "the next step puts the loaded weights in place")
        end(engine)

    def takes_over_from_zero_3(self) -> None:
        """Layout checkpointd: the weights and masters, and not the moments, for which there is no place."""
        root = str(self.folder / "zero-3")
        plain = make(Kind(3, "bfloat16", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}))
        attach(plain, layout="checkpointd")
        train(plain, 0, 3)
        plain.save_checkpoint(root)
        saved = weights(plain)
        end(plain)
        engine = make(superoffload(), seed=1)
        attach(engine, layout="checkpointd")
        engine.load_checkpoint(root)
        together = [torch.cat([one.flatten().float() for one in some]) for some in (weights(engine), saved)]
        self.check(torch.equal(*together), "other weights or masters than the saved ones")
        self.check(not engine.optimizer.optimizer.state, "moments that nothing uses")
        train(engine, 3, 5)
        end(engine)

    def says_that_it_came_too_late(self) -> None:
        """ZenFlow's steps are counted from the first one."""
        engine = make(zenflow(1, overlap=True))
        train(engine, 0, 2)
        try:
            attach(engine)
        except CheckpointdError as error:
            self.check("attach(engine) before the first engine.step()" in str(error), str(error))
        else:
            self.wrong.append("it was attached")
        end(engine)


def main() -> None:
    rank = Rank(Path(sys.argv[1]))
    deepspeed.init_distributed(dist_backend="gloo")
    wanted = sys.argv[2:]
    for name in KINDS:
        if not wanted or name in wanted:
            with rank.case(f"resumes as DeepSpeed does: {name}"):
                rank.resumes_as_deepspeed_does(name)
    if not wanted or "moments" in wanted:
        for layout in LAYOUTS:
            for case in (
                rank.refuses_the_moment_between_backward_and_step,
                rank.names_a_process_that_died,
                rank.needs_no_process_after_a_step,
                rank.loads_while_zenflow_is_stepping,
            ):
                with rank.case(f"{case.__name__.replace('_', ' ')}, in layout {layout}"):
                    case(layout)
        with rank.case("takes over from ZeRO 3"):
            rank.takes_over_from_zero_3()
        with rank.case("says that it came too late"):
            rank.says_that_it_came_too_late()
    rank.finish()
    leave_process_group()


if __name__ == "__main__":
    main()
