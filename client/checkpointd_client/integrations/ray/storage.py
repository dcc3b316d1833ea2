"""The root of a run: the folder `checkpointd` in the directory where Ray keeps the run."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from checkpointd.errors import UsageError

FOLDER = "checkpointd"


def root_of(filesystem: Any, experiment: str) -> str:
    """The root for a run that Ray keeps at the path `experiment` of a pyarrow `filesystem`: a path, or the URL of a bucket.

    Raises UsageError for a file system that checkpointd cannot reach by itself.
    """
    path = f"{experiment.rstrip('/')}/{FOLDER}"
    kind = filesystem.type_name
    if kind == "local":
        return path
    if kind == "gcs":
        return f"gs://{path}"
    if kind == "s3":
        return f"s3://{path}{_query(filesystem)}"
    raise UsageError(
        f"the run's storage is a pyarrow file system of the kind {kind!r}, and checkpointd cannot tell where it is: name a "
        "root that every worker sees, as in RayCheckpointer('/mnt/ckpts/run1') or RayCheckpointer('az://container/run1?account=...')"
    )


def _query(filesystem: Any) -> str:
    """How to reach the server, as Ray was told in its `storage_path`: pyarrow shows it only in how it pickles a file system."""
    settings = filesystem.__reduce__()[1][0]
    found = {}
    if settings.get("endpoint_override"):
        found["endpoint"] = f"{settings.get('scheme') or 'https'}://{settings['endpoint_override']}"
    if settings.get("region"):
        found["region"] = settings["region"]
    if settings.get("anonymous"):
        found["anonymous"] = "true"
    return f"?{urlencode(found)}" if found else ""
