"""Judges the settings of a bucket: whether something else than checkpointd removes, moves or keeps its objects."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from checkpointd.bucket_urls import PROVIDERS, BucketUrl, Scheme
from checkpointd.commands import install
from checkpointd.doctor.finding import Finding
from checkpointd.store.objects.settings import BucketSettings, LifecycleRule, Reading

_ASK: Final = "ask the bucket's owner, or allow these credentials to read the setting"

_finding = partial(Finding, "root")


def judged(found: BucketSettings | None, url: BucketUrl) -> list[Finding]:
    """The findings about all settings of the bucket at `url`."""
    if found is None:
        return [_finding("lifecycle", "note", "not read: botocore is not installed", install("s3"))]
    return [
        lifecycle(found.rules, url.prefix),
        versioning(found),
        retention(found.retention),
        encryption(found.encryption, url.options.get("encryption", "")),
    ]


def of_other_provider(scheme: Scheme) -> Finding:
    """Only S3's settings are read."""
    advice = "look there yourself: nothing but checkpointd may remove or move objects below the root"
    return _finding("lifecycle", "note", f"the settings of {PROVIDERS[scheme]} are not read", advice)


def lifecycle(found: Reading[tuple[LifecycleRule, ...]], prefix: str) -> Finding:
    """Rules that would remove checkpoints, or move them to where they cannot be read at once."""
    if found.unread:
        return _finding("lifecycle", "note", f"the rules cannot be read: {found.unread}", _ASK)
    here = [rule for rule in found.value if _meets(rule, prefix)]
    harm = [words for rule in here for words in _harm(rule)]
    if harm:
        advice = "except the root from the rule: removing checkpoints is up to `retention`"
        return _finding("lifecycle", "warn", f"rules reach below the root: {'; '.join(harm)}", advice)
    aborts = [rule.aborts_uploads for rule in here if rule.aborts_uploads]
    also = f"; unfinished uploads are aborted {aborts[0]}" if aborts else ""
    return _finding("lifecycle", "ok", f"no rule removes or moves objects below the root{also}")


def _meets(rule: LifecycleRule, prefix: str) -> bool:
    """Whether the rule can be for objects of the root, which have no tags."""
    root = f"{prefix}/" if prefix else ""
    return not rule.chosen_by_tag and (root.startswith(rule.prefix) or rule.prefix.startswith(root))


def _harm(rule: LifecycleRule) -> Iterator[str]:
    name = f"rule {rule.name!r}" + (f" (below {rule.prefix})" if rule.prefix else "")
    if rule.expires:
        yield f"{name} removes objects {rule.expires}"
    if rule.moves:
        yield f"{name} moves objects {rule.moves}"


def versioning(found: BucketSettings) -> Finding:
    """Versioning keeps what checkpointd removes, and its owner pays for it."""
    read = found.versioning
    if read.unread:
        return _finding("versioning", "note", f"it cannot be read: {read.unread}", _ASK)
    if read.value != "Enabled":
        return _finding("versioning", "ok", "what checkpointd removes is gone: the bucket keeps no old versions")
    ends = [rule.expires_noncurrent for rule in found.rules.value if rule.expires_noncurrent]
    if ends:
        return _finding("versioning", "note", f"removed checkpoints stay as old versions; a rule ends them {ends[0]}")
    advice = "add a lifecycle rule that removes noncurrent versions, or the bucket grows with every save"
    return _finding("versioning", "warn", "removed checkpoints stay as old versions, and are charged", advice)


def retention(found: Reading[str]) -> Finding:
    """Object lock keeps every object for a time, whoever removes it."""
    if found.unread:
        return _finding("retention", "note", f"it cannot be read: {found.unread}", _ASK)
    if not found.value:
        return _finding("retention", "ok", "no object lock keeps objects by default")
    advice = "use a bucket without a default retention: what checkpointd removes stays that long, and is charged"
    return _finding("retention", "warn", f"object lock keeps every object: {found.value}", advice)


def encryption(found: Reading[str], asked: str) -> Finding:
    """Encryption at rest, by the bucket's default or by the option `encryption` of the URL."""
    if asked:
        return _finding("encryption", "ok", f"the URL asks for {asked}")
    if found.unread:
        return _finding("encryption", "note", f"the default cannot be read: {found.unread}", _ASK)
    if found.value:
        return _finding("encryption", "ok", f"the bucket encrypts objects at rest: {found.value}")
    advice = "set a default in the bucket, or add ?encryption=AES256, if states need it"
    return _finding("encryption", "note", "the bucket does not say that it encrypts objects at rest", advice)
