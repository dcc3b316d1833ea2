"""What the settings of a bucket mean for checkpoints, and how they are read from S3's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkpointd.bucket_urls import parse
from checkpointd.doctor.bucket import settings
from checkpointd.store.objects.settings import BucketSettings, LifecycleRule, Reading, read_settings
from tests.servers.clients import s3_client
from tests.servers.fixtures import Place, root_at

DELETES = LifecycleRule("old", expires="after 30 days")
PLAIN = BucketSettings(rules=Reading(()), versioning=Reading(""), retention=Reading(""), encryption=Reading("AES256"))


@pytest.mark.parametrize(
    ("rule", "prefix", "level", "words"),
    [
        (DELETES, "runs/a", "warn", "removes objects after 30 days"),
        (DELETES, "", "warn", "removes objects after 30 days"),
        (replace(DELETES, prefix="runs/"), "runs/a", "warn", "(below runs/)"),
        (replace(DELETES, prefix="runs/a/global_step1/"), "runs/a", "warn", "(below runs/a/global_step1/)"),
        (replace(DELETES, prefix="runs/a"), "runs/a", "warn", "removes"),
        (replace(DELETES, prefix="run"), "runs/a", "warn", "removes"),
        (replace(DELETES, prefix="runs/ab"), "runs/a", "ok", "no rule"),
        (replace(DELETES, prefix="logs/"), "runs/a", "ok", "no rule"),
        (replace(DELETES, chosen_by_tag=True), "runs/a", "ok", "no rule"),
        (LifecycleRule("cold", moves="to GLACIER after 9 days"), "runs/a", "warn", "moves objects to GLACIER after 9 days"),
        (LifecycleRule("tidy", aborts_uploads="after 7 days"), "runs/a", "ok", "aborted after 7 days"),
    ],
)
def test_lifecycle_rules(rule: LifecycleRule, prefix: str, level: str, words: str) -> None:
    found = settings.lifecycle(Reading((rule,)), prefix)
    assert found.level == level
    assert words in found.seen
    assert bool(found.fix) == (level == "warn")


def test_old_versions_grow_unless_a_rule_ends_them() -> None:
    kept = replace(PLAIN, versioning=Reading("Enabled"))
    assert settings.versioning(kept).level == "warn"
    assert "grows" in settings.versioning(kept).fix
    ended = replace(kept, rules=Reading((LifecycleRule("ends", expires_noncurrent="after 3 days"),)))
    assert settings.versioning(ended).level == "note"
    assert "after 3 days" in settings.versioning(ended).seen
    assert settings.versioning(replace(PLAIN, versioning=Reading("Suspended"))).level == "ok"


def test_object_lock_and_encryption() -> None:
    assert settings.retention(Reading("COMPLIANCE for 30 days")).level == "warn"
    assert settings.retention(Reading("")).level == "ok"
    assert settings.encryption(Reading("aws:kms"), "").level == "ok"
    assert settings.encryption(Reading(""), "").level == "note"
    assert settings.encryption(Reading(""), "AES256").level == "ok"


def test_what_cannot_be_read_is_a_note() -> None:
    hidden: Reading[Any] = Reading("", "AccessDenied")
    found = settings.judged(
        BucketSettings(rules=Reading((), "AccessDenied"), versioning=hidden, retention=hidden, encryption=hidden),
        parse("s3://ckpts/run1"),
    )
    assert [one.check for one in found] == ["lifecycle", "versioning", "retention", "encryption"]
    assert {one.level for one in found} == {"note"}
    assert all("AccessDenied" in one.seen and one.fix for one in found)


def test_without_botocore_and_at_other_providers() -> None:
    [found] = settings.judged(None, parse("s3://ckpts/run1"))
    assert (found.level, "botocore" in found.seen) == ("note", True)
    assert "Google Cloud Storage" in settings.of_other_provider("gs").seen


def test_settings_are_read_as_s3_answers(moto_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    root = parse(root_at(moto_place, monkeypatch))
    assert read_settings(root) == replace(PLAIN, encryption=read_settings(root).encryption)  # type: ignore[union-attr]
    client, name = s3_client(moto_place.server.endpoint, moto_place.server.admin), moto_place.bucket
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    client.put_bucket_encryption(
        Bucket=name,
        ServerSideEncryptionConfiguration={"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]},
    )
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": RULES})
    found = read_settings(root)
    assert found == BucketSettings(
        rules=Reading(
            (
                LifecycleRule("old", "runs/", expires="after 30 days", expires_noncurrent="after 3 days"),
                LifecycleRule("cold", "", chosen_by_tag=True, moves="to GLACIER after 9 days"),
                LifecycleRule("tidy", "", aborts_uploads="after 7 days"),
            )
        ),
        versioning=Reading("Enabled"),
        retention=Reading(""),
        encryption=Reading("AES256"),
    )


RULES = [
    {
        "ID": "old",
        "Status": "Enabled",
        "Filter": {"Prefix": "runs/"},
        "Expiration": {"Days": 30},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 3},
    },
    {
        "ID": "cold",
        "Status": "Enabled",
        "Filter": {"Tag": {"Key": "cold", "Value": "yes"}},
        "Transitions": [{"Days": 9, "StorageClass": "GLACIER"}],
    },
    {
        "ID": "tidy",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
    },
    {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}},
]


def test_a_default_retention_is_read(moto_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    client = s3_client(moto_place.server.endpoint, moto_place.server.admin)
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    client.put_object_lock_configuration(
        Bucket="locked",
        ObjectLockConfiguration={
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 30}},
        },
    )
    found = read_settings(parse(root_at(replace(moto_place, bucket="locked"), monkeypatch)))
    assert found is not None
    assert (found.retention, found.versioning) == (Reading("COMPLIANCE for 30 days"), Reading("Enabled"))


def test_a_bucket_that_is_not_there_has_no_settings(moto_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_settings(parse(root_at(replace(moto_place, bucket="nothing"), monkeypatch)))
    assert found is not None
    assert {one.unread for one in (found.rules, found.versioning, found.encryption)} == {"NoSuchBucket"}
