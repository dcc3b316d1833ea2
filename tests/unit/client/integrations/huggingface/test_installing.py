"""install() refuses what it cannot use, and says what was meant."""

from __future__ import annotations

from typing import Any

import pytest

from checkpointd.errors import UsageError
from checkpointd_client.integrations.huggingface import install
from checkpointd_client.integrations.huggingface.filling import SAVERS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rooot": "/mnt"}, "no option 'rooot': did you mean root"),
        ({"synchronos": True}, "no option 'synchronos': did you mean synchronous"),
        ({"retentoin": 3}, "no option 'retentoin': did you mean retention"),
        ({"xyz": 3}, "no option 'xyz': the options are root, synchronous, compression"),
        ({"synchronous": "no"}, "synchronous is 'no'; it must be True or False"),
        ({"root": 3}, "root is 3; it must be a path"),
    ],
)
def test_a_wrong_option_is_named_and_nothing_is_installed(options: dict[str, Any], words: str) -> None:
    before = list(SAVERS)
    with pytest.raises(UsageError, match=words):
        install(**options)
    assert before == SAVERS
