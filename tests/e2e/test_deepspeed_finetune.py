"""The DeepSpeed example under torchrun: it saves on two ranks and continues on one with the same losses."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(EXAMPLES))

from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED, run_ranks  # noqa: E402
from words import WordTokenizer  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), NEEDS_DEEPSPEED]

SMALL = ["--layers", "1", "--length", "16", "--vocabulary", "400", "--text_bytes", "100000", "--save_every", "5"]


STEPS = 8


def losses(ranks: int, folder: Path, *arguments: str) -> dict[int, float]:
    """The losses that rank 0 prints, by step."""
    script = EXAMPLES / "deepspeed_finetune.py"
    done = run_ranks(script, "--output_dir", folder, *SMALL, "--steps", STEPS, *arguments, ranks=ranks, limit_s=250)
    assert done.returncode == 0, done.stderr[-6000:]
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)}


@pytest.mark.nightly
def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ds"
    undisturbed = losses(2, folder, "--save_checkpoint")
    assert list(undisturbed) == list(range(STEPS))
    assert (folder / "checkpoints" / "latest").read_text() == "global_step5\n"
    tokenizer, text = WordTokenizer.from_pretrained(folder / "tokenizer"), "def resume(self): \u00e4"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    resumed = losses(1, folder, "--resume")
    assert resumed == pytest.approx({step: undisturbed[step] for step in (5, 6, 7)}, abs=2e-4)


# --- what is around a save, without engines ----------------------------------------------------------------------------


class Engine:
    """What the script calls of one; `handle` says when it was waited for."""

    def __init__(self, done: list[str], failure: Exception | None = None) -> None:
        self.done, self.failure = done, failure
        self.tag, self.timings = "global_step5", SimpleNamespace(committed_s=0.5, call_s=0.01)

    def save_checkpoint(self, *_: object, **__: object) -> None:
        self.done.append("save")
        if self.failure is not None:
            raise self.failure

    def checkpoint_handle(self) -> Engine:
        return self

    def wait(self) -> None:
        self.done.append("committed")
        if self.failure is not None:
            raise self.failure

    def destroy(self) -> None:
        self.done.append("destroyed")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("deepspeed_finetune")
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    return module


@pytest.mark.parametrize("failure", [None, OSError("no space left")])
def test_a_run_is_finished_once_its_checkpoint_is_committed_or_has_failed(
    script: ModuleType, failure: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    script.finish(Engine(done, failure), SimpleNamespace(finish=lambda: done.append("run finished")))
    assert done == ["committed", "run finished", "destroyed"]
    assert ("no space left" in caplog.text) == (failure is not None)


def test_a_save_that_fails_is_logged_and_training_goes_on(
    script: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    script.save(Engine(done, OSError("no space left")), WordTokenizer.train(b"some words", vocabulary=300), tmp_path, 5)
    assert done == ["save"]
    assert "the save after 5 steps failed" in caplog.text
    assert "no space left" in caplog.text
