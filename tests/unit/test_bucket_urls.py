"""URLs of buckets: what they mean, and that no secret gets through."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from checkpointd.bucket_urls import OPTIONS, is_bucket_url, parse
from checkpointd.errors import UsageError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/run1", "s3://bucket/run1"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("S3A://bucket/a/b/", "s3://bucket/a/b"),
        ("gcs://bucket/run1", "gs://bucket/run1"),
        ("azure://container/run1?account=mine", "az://container/run1?account=mine"),
        ("s3://bucket/with%20space", "s3://bucket/with%20space"),
        (
            "s3://bucket/r?region=eu-west-1&endpoint=http://h:9000",
            "s3://bucket/r?endpoint=http://h:9000&region=eu-west-1",
        ),
    ],
)
def test_each_place_has_one_spelling(text: str, url: str) -> None:
    assert is_bucket_url(text)
    assert parse(text).url == url
    assert parse(url) == parse(text)


@pytest.mark.parametrize("text", ["/mnt/s3", "s3/bucket", "file:///s3", "memory://s3", "http://bucket/x", "s3:bucket"])
def test_other_roots_are_not_taken_for_buckets(text: str) -> None:
    assert not is_bucket_url(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://", "not the name of a bucket"),
        ("s3:///run1", "not the name of a bucket"),
        ("s3://Bucket/run1", "lower case"),
        ("s3://b/run1", "not the name of a bucket"),
        ("s3://host:9000/bucket", r"endpoint="),
        ("s3://bucket/a/../b", "cannot be the path"),
        ("s3://bucket/a//b", "cannot be the path"),
        ("s3://bucket/run#1", "%23"),
        ("s3://bucket/run1?regoin=x", "no option 'regoin'.*region"),
        ("s3://bucket/run1?region=a&region=b", "given twice"),
        ("s3://bucket/run1?region=", "region: it is empty"),
        ("s3://bucket/run1?addressing=vhost", "give path or virtual"),
        ("s3://bucket/run1?anonymous=yes", "give true or false"),
        ("s3://bucket/run1?retry_s=soon", "a number of seconds"),
        ("s3://bucket/run1?retry_s=0", "above 0"),
        ("s3://bucket/run1?retry_s=nan", "above 0"),
        ("s3://bucket/run1?endpoint=minio:9000", "give a URL such as"),
        ("s3://bucket/run1?checksum=md5", "give sha256 or crc64nvme"),
        ("s3://bucket/run1?account=mine", "no option 'account'"),
        ("gs://bucket/run1?region=x", "no option 'region'"),
    ],
)
def test_a_mistake_is_named(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA123:HUSH@bucket/run1",
        "s3://bucket/run1?secret_access_key=HUSH",
        "s3://bucket/run1?aws_session_token=HUSH",
        "az://container/run1?account_key=HUSH",
        "az://container/run1?sas=HUSH",
        "s3://bucket/run1?endpoint=http://key:HUSH@host:9000",
        "s3://bucket/run1?nonsense=HUSH",
        "s3://Bucket/run1?secret_access_key=HUSH",
        "s3://AKIA123:HU/SH@bucket/run1",
        "s3://AKIA123:HU?SH@bucket/run1",
        "s3://AKIA123:HU#SH@bucket/run1",
        "s3://AKIA123:HU[SH@bucket/run1",
        "s3://bucket/run1?endpoint=https://host/?X-Amz-Signature=HUSH",
        "s3://bucket/run1?endpoint=https://host/%23HUSH",
        "s3://bucket/run1?endpoint=https://[HUSH",
    ],
)
def test_a_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert "HU" not in str(caught.value)
    assert "SH" not in str(caught.value)


@pytest.mark.parametrize("text", ["./s3:/bucket/run1", "/mnt/gs:"])
def test_no_path_leads_through_a_directory_that_is_named_as_the_remains_of_a_url(text: str) -> None:
    with pytest.raises(UsageError, match="No directory of a path may have this name"):
        is_bucket_url(text)


@pytest.mark.parametrize("text", ["s3:/bucket/run1", "S3:/bucket", str(PurePosixPath("gs://bucket/run1")), "file:/mnt"])
def test_a_url_that_has_lost_a_slash_is_no_directory(text: str) -> None:
    with pytest.raises(UsageError, match="two slashes"):
        is_bucket_url(text)


def test_every_option_is_one_of_some_provider() -> None:
    for option in OPTIONS:
        taken = 0
        for scheme in ("s3", "gs", "az"):
            for value in ("x", "true", "path", "sha256", "5", "http://h"):
                try:
                    taken += parse(f"{scheme}://bucket?{option}={value}").options[option] == value
                except UsageError:
                    continue
        assert taken, option
