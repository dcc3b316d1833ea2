"""Reads DeepSpeed's files without running anything that is pickled in them: tensors mapped from the disk, plain values, and
Records for objects of any other class.
"""

from __future__ import annotations

from typing import Any

from checkpointd.errors import DamagedError, NotFoundError, UnreadableError, UsageError
from checkpointd.regular_files import open_regular
from checkpointd.system_errors import in_words
from checkpointd_client.unpickling.records import PickleFault, PickleLimit
from checkpointd_client.unpickling.torch_file import UntrustedTorchFile, mapped


def read(path: str) -> dict[str, Any]:
    """Read a file; its tensors stay on the disk until they are used. DamagedError if torch.save did not write it.

    NotFoundError if it does not exist; UnreadableError if it cannot be opened or read, or is not a regular file; UsageError if
    it would take too much time or memory, for example because of its depth.
    """
    try:
        with open_regular(path) as file:
            found = UntrustedTorchFile(file, mapped(file)).value()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist: it was removed, or links to a removed file. Load another tag") from error
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {in_words(error, 'file')}") from error
    except PickleLimit as error:
        raise UsageError(f"{path} is too large to read: {error}. Save it again without such values") from error
    except PickleFault as error:
        raise DamagedError(f"{path} cannot be read as a file of torch.save: {error}", key=path) from error
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is not a checkpoint of DeepSpeed: it holds a {type(found).__name__}", key=path)
    return found
