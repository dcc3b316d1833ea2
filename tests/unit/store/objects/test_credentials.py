"""What the environment and the profiles of ~/.aws say reaches both clients of S3, and no secret reaches a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.bucket_urls import parse
from checkpointd.store import open_store
from checkpointd.store.objects.credentials import s3_client, s3_place, s3_session
from tests.servers.fixtures import Place

PROFILES = """
[default]
region = eu-default-1
[profile mine]
region = eu-mine-1
endpoint_url = http://mine:1
[profile services]
endpoint_url = http://all:1
services = others
[services others]
s3 =
  endpoint_url = http://s3:1
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ~/.aws of the test, and no other source of credentials."""
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "REGION", "DEFAULT_REGION", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


@pytest.mark.parametrize(
    ("url", "environment", "endpoint", "region"),
    [
        ("s3://bucket", {}, None, "eu-default-1"),
        ("s3://bucket", {"AWS_DEFAULT_REGION": "eu-env-1"}, None, "eu-env-1"),
        ("s3://bucket", {"AWS_DEFAULT_REGION": "eu-env-1", "AWS_REGION": "eu-env-2"}, None, "eu-env-2"),
        ("s3://bucket?region=eu-url-1", {"AWS_REGION": "eu-env-1"}, None, "eu-url-1"),
        ("s3://bucket?profile=mine", {}, "http://mine:1", "eu-mine-1"),
        ("s3://bucket", {"AWS_PROFILE": "mine", "AWS_REGION": "eu-env-1"}, "http://mine:1", "eu-env-1"),
        ("s3://bucket?profile=services", {}, "http://s3:1", None),
        ("s3://bucket?profile=mine", {"AWS_ENDPOINT_URL": "http://env:1"}, "http://env:1", "eu-mine-1"),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "http://env:1", "AWS_ENDPOINT_URL_S3": "http://env:2"}, "http://env:2", "eu-default-1"),
        ("s3://bucket?endpoint=http://url:1", {"AWS_ENDPOINT_URL_S3": "http://env:2"}, "http://url:1", "eu-default-1"),
    ],
)  # fmt: skip
def test_both_clients_go_to_the_same_place(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    environment: dict[str, str],
    endpoint: str | None,
    region: str | None,
) -> None:
    (home / "config").write_text(PROFILES)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = s3_place(parse(url), s3_session(parse(url).options.get("profile"))).options
    assert (found.get("endpoint"), found.get("region")) == (endpoint, region)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    client = s3_client(parse(url))
    assert client is not None
    assert client.meta.region_name == region or region is None
    assert client.meta.endpoint_url == endpoint or endpoint is None


@pytest.mark.parametrize("source", ["environment", "profile"])
async def test_an_endpoint_outside_the_url_is_used(
    seaweed_place: Place, home: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    server = seaweed_place.server
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    if source == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    else:
        (home / "config").write_text(f"[default]\nendpoint_url = {server.endpoint}\n")
    async with open_store(f"s3://{seaweed_place.bucket}/{seaweed_place.prefix}?retry_s=1") as store:
        await store.put("x", b"here")
    async with open_store(f"s3://{seaweed_place.bucket}/{seaweed_place.prefix}?endpoint={server.endpoint}") as store:
        assert await store.get("x") == b"here"


def test_the_bucket_is_in_the_name_of_an_endpoint_outside_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `addressing=virtual` would take the first part of the root for the bucket."""
    from checkpointd.store.objects.remote import RemoteBucket

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:9000")
    client = RemoteBucket(parse("s3://bucket/run1?addressing=virtual"))._client
    assert client.config["endpoint"] == "http://bucket.host:9000"  # type: ignore[union-attr,typeddict-item]
