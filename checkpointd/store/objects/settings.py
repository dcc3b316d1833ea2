"""The settings of an S3 bucket that matter to checkpoints, read through botocore as far as rights allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from checkpointd.bucket_urls import BucketUrl
from checkpointd.store.objects.credentials import s3_client

T = TypeVar("T")

_NOT_SET: Final = frozenset(
    {
        "NoSuchLifecycleConfiguration",
        "ObjectLockConfigurationNotFoundError",
        "NoSuchObjectLockConfiguration",
        "ServerSideEncryptionConfigurationNotFoundError",
    }
)
"""The codes of a setting that nobody has made."""


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """A rule that is on. `expires`, `moves` and `expires_noncurrent` say when, in words; "" if the rule does not do it."""

    name: str
    prefix: str = ""
    chosen_by_tag: bool = False
    """The rule is for objects with certain tags."""
    expires: str = ""
    moves: str = ""
    expires_noncurrent: str = ""
    aborts_uploads: str = ""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A setting, or in `unread` the reason why it cannot be read."""

    value: T
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSettings:
    """`versioning`: "Enabled", "Suspended" or "". `retention`: the default of object lock, "" if there is none. `encryption`:
    the algorithm at rest, or "".
    """

    rules: Reading[tuple[LifecycleRule, ...]]
    versioning: Reading[str]
    retention: Reading[str]
    encryption: Reading[str]


def read_settings(url: BucketUrl) -> BucketSettings | None:
    """The settings of the bucket at `url`; None if botocore is not installed. Blocks for a few requests, and raises nothing."""
    client = s3_client(url)
    if client is None:
        return None
    name = {"Bucket": url.bucket}
    return BucketSettings(
        rules=_read(lambda: client.get_bucket_lifecycle_configuration(**name), _rules, ()),
        versioning=_read(lambda: client.get_bucket_versioning(**name), lambda found: str(found.get("Status", "")), ""),
        retention=_read(lambda: client.get_object_lock_configuration(**name), _retention, ""),
        encryption=_read(lambda: client.get_bucket_encryption(**name), _algorithm, ""),
    )


def _read(ask: Callable[[], Any], understood: Callable[[Any], T], nothing: T) -> Reading[T]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return Reading(understood(ask()))
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "")) or "an error without a code"
        return Reading(nothing, "" if code in _NOT_SET else code)
    except (BotoCoreError, LookupError, TypeError) as error:  # the last two: an answer that is not as S3's
        return Reading(nothing, f"{type(error).__name__}: {error}")


def _rules(found: Mapping[str, Any]) -> tuple[LifecycleRule, ...]:
    return tuple(_rule(one) for one in found.get("Rules", ()) if one.get("Status") == "Enabled")


def _rule(found: Mapping[str, Any]) -> LifecycleRule:
    chosen = found.get("Filter", {})
    both = chosen.get("And", chosen)
    abort = found.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
    noncurrent = found.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays")
    return LifecycleRule(
        name=str(found.get("ID", "without a name")),
        prefix=str(both.get("Prefix", found.get("Prefix", ""))),
        chosen_by_tag=bool(both.get("Tag") or both.get("Tags")),
        expires=_when(found.get("Expiration", {})),
        moves=_moves(found.get("Transitions", ())),
        expires_noncurrent="" if noncurrent is None else f"after {noncurrent} days",
        aborts_uploads="" if abort is None else f"after {abort} days",
    )


def _when(found: Mapping[str, Any]) -> str:
    if "Days" in found:
        return f"after {found['Days']} days"
    return f"on {found['Date']:%Y-%m-%d}" if "Date" in found else ""


def _moves(found: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"to {one.get('StorageClass', 'another class')} {_when(one)}".strip() for one in found)


def _retention(found: Mapping[str, Any]) -> str:
    default = found.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
    lengths = [f"{default[unit]} {unit.lower()}" for unit in ("Years", "Days") if default.get(unit)]
    return f"{default.get('Mode', '')} for {lengths[0]}".strip() if lengths else ""


def _algorithm(found: Mapping[str, Any]) -> str:
    rules = found["ServerSideEncryptionConfiguration"]["Rules"]
    return str(rules[0].get("ApplyServerSideEncryptionByDefault", {}).get("SSEAlgorithm", "")) if rules else ""
