"""Engines whose saves Hugging Face's libraries ask for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.errors import NotFoundError, UsageError
from checkpointd_client.integrations.deepspeed import install
from checkpointd_client.integrations.deepspeed.watching import watch
from checkpointd_client.integrations.huggingface.accelerator import _loading_state


def test_the_other_layout_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="checkpoint-N directories that hold DeepSpeed's files"):
        install(layout="checkpointd")


def test_accelerate_is_told_of_a_missing_checkpoint_by_an_error_and_others_as_deepspeed_tells_it() -> None:
    class Plug:
        """Nothing is saved here."""

    plug: Any = Plug()

    class Engine:
        def save_checkpoint(self, save_dir: str) -> None: ...

        def load_checkpoint(self, load_dir: str) -> tuple[str | None, dict[str, object] | None]:
            return (load_dir, {}) if load_dir == "there" else (None, None)

    engine = Engine()
    watch(engine, plug)
    load_state = _loading_state(lambda _accelerator, input_dir: engine.load_checkpoint(input_dir))
    with pytest.raises(NotFoundError, match="no checkpoint was committed in elsewhere"):
        load_state(None, "elsewhere")
    assert load_state(None, "there") == ("there", {})
    assert engine.load_checkpoint("elsewhere") == (None, None)
