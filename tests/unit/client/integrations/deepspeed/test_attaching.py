"""attach() and install() refuse what they cannot use at once, and say what was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointd.errors import UsageError
from tests.unit.client.integrations.deepspeed.deepspeed_engine import Engine

pytest.importorskip("deepspeed", reason="needs deepspeed")
from checkpointd_client.integrations.deepspeed import attach, install

BAD: list[tuple[dict[str, Any], str]] = [
    ({"layuot": "checkpointd"}, "no option 'layuot': did you mean layout"),
    ({"rooot": "/mnt"}, "no option 'rooot': did you mean root"),
    ({"synchronos": True}, "no option 'synchronos': did you mean synchronous"),
    ({"retentoin": 3}, "no option 'retentoin': did you mean retention"),
    ({"xyz": 3}, "no option 'xyz': the options are root, sidecar, layout, synchronous, compression"),
    ({"layout": "deepsped"}, "layout is 'deepsped'; choose one of deepspeed, checkpointd"),
    ({"synchronous": "no"}, "synchronous is 'no'; it must be True or False"),
    ({"root": 3}, "root is 3; it must be a path"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_a_wrong_setting_is_named_wherever_it_is_given(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attach(Engine(), **options)
    with pytest.raises(UsageError, match=words):
        install(**options)
    engine = Engine()
    engine.config = {"checkpoint": {"checkpointd": options}}  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=words):
        attach(engine)


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), (Engine(), None, None, None), None, "engine"])
def test_what_is_no_engine_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"takes the engine that deepspeed\.initialize\(\) returns first"):
        attach(given)
