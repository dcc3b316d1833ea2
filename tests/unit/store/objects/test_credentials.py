"""What the environment and the profiles of ~/.aws say reaches both clients of S3, and no secret reaches a message."""

from __future__ import annotations

import logging
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session

from checkpointd.bucket_urls import parse
from checkpointd.errors import StoreError, UsageError
from checkpointd.store import open_store
from checkpointd.store.objects.credentials import s3_client, s3_place, s3_session
from checkpointd.store.objects.remote import RemoteBucket
from checkpointd.store.uploads import unfinished_uploads_of
from tests.servers.careless_proxy import CarelessProxy
from tests.servers.fixtures import Place, root_at

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
    for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "ENDPOINT", "REGION", "DEFAULT_REGION", "PROFILE", "CA_BUNDLE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
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
        ("s3://bucket", {"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "http://b:1"}, "http://b:1", "eu-default-1"),
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
    keys = "aws_access_key_id = key\naws_secret_access_key = hush\n"
    (home / "credentials").write_text("".join(f"[{profile}]\n{keys}" for profile in ("default", "mine", "services")))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = s3_place(parse(url), s3_session(parse(url).options.get("profile"))).options
    assert (found.get("endpoint"), found.get("region")) == (endpoint, region)
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


def test_a_public_bucket_is_at_the_endpoint_of_the_profile_too(home: Path) -> None:
    (home / "config").write_text("[default]\nendpoint_url = http://host:9000\nregion = eu-mine-1\n")
    client = RemoteBucket(parse("s3://bucket/run1?anonymous=true"))._client
    assert client.config["endpoint"] == "http://host:9000"  # type: ignore[union-attr,typeddict-item]
    assert client.config["region"] == "eu-mine-1"  # type: ignore[union-attr,typeddict-item]
    assert client.config["skip_signature"] == "true"  # type: ignore[union-attr,typeddict-item]


@pytest.mark.parametrize("source", ["url", "profile"])
def test_the_bucket_is_in_the_name_of_an_endpoint_outside_the_url(
    home: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Else virtual addressing would take the first part of the root for the bucket."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:9000")
    if source == "profile":
        (home / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    root = parse("s3://bucket/run1?addressing=virtual" if source == "url" else "s3://bucket/run1")
    client = RemoteBucket(root)._client
    assert client.config["endpoint"] == "http://bucket.host:9000"  # type: ignore[union-attr,typeddict-item]
    assert client.config["virtual_hosted_style_request"] == "true"  # type: ignore[union-attr,typeddict-item]


@pytest.mark.parametrize(("name", "value"), [("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true"), ("AWS_CONDITIONAL_PUT", "disabled")])
async def test_variables_of_the_client_alone_change_nothing(
    seaweed_place: Place, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The first one took the first part of the root for the bucket, and listings found nothing."""
    monkeypatch.setenv(name, value)
    async with open_store(root_at(seaweed_place, monkeypatch)) as store:
        assert await store.put_if_absent("x", b"1")
        assert [entry.name for entry in await store.list("")] == ["x"]


@pytest.mark.parametrize(
    ("environment", "config", "words"),
    [
        ({}, "", "no credentials were found.*; set AWS_ACCESS_KEY_ID.*anonymous=true"),
        ({"AWS_ACCESS_KEY_ID": "key"}, "", "missing: AWS_SECRET_ACCESS_KEY; set AWS_ACCESS_KEY_ID and"),
        ({}, "[default]\ncredential_process = /not/there\n", "'/not/there'; set AWS_ACCESS_KEY_ID and"),
        ({"AWS_PROFILE": "mine"}, "[profile mine]\ncredential_process = /bin/false\n", "custom-process"),
        (
            {"AWS_PROFILE": "mine"},
            "[profile mine]\nsso_start_url = https://x.example\nsso_region = a\nsso_account_id = 1\nsso_role_name = r\n",
            "SSO Token.*; set AWS_ACCESS_KEY_ID and",
        ),
        ({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "HUSH\n"}, "", "line break"),
        (
            {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_SESSION_TOKEN": "HUSH\n"},
            "",
            "line break",
        ),
    ],
)
async def test_credentials_that_cannot_be_had_are_an_error_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], config: str, words: str
) -> None:
    """It says what is wrong, is not tried again for `retry_s`, and repeats no secret."""
    (home / "config").write_text(config)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asked: list[str | None] = []
    monkeypatch.setattr(Session, "get_credentials", _noting(Session.get_credentials, asked))
    async with open_store("s3://bucket/run1?endpoint=http://127.0.0.1:1&retry_s=20") as store:
        for call in (lambda: store.put("x", b""), lambda: store.list(""), lambda: unfinished_uploads_of(store)):
            with pytest.raises(StoreError, match=f"s3://bucket/run1.*failed: .*{words}") as caught:
                await call()
            assert "HUSH" not in "".join(traceback.format_exception(caught.value))
            assert "server was not reached" not in str(caught.value)
    assert len(asked) <= 6


@pytest.mark.parametrize("source", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "endpoint_url in ~/.aws"])
def test_an_endpoint_outside_the_url_that_is_no_url_is_an_error_of_use(
    home: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The client in Rust panics over it."""
    if source.startswith("AWS"):
        monkeypatch.setenv(source, "key:HUSH@localhost:9000")
    else:
        (home / "config").write_text("[default]\nendpoint_url = key:HUSH@localhost:9000\n")
    with pytest.raises(UsageError, match=f"the value of {source}: give a URL such as https://minio") as caught:
        open_store("s3://bucket")
    assert "HUSH" not in str(caught.value)
    open_store("s3://bucket?endpoint=http://localhost:9000")  # this one counts


@pytest.fixture
def private(moto_place: Place, tmp_path: Path) -> Iterator[str]:
    """The endpoint of moto behind TLS, whose certificate a private authority has signed: `authority.pem` in `tmp_path`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=authority"
    _openssl(tmp_path, f"{made} -keyout authority.key -out authority.pem")
    _openssl(tmp_path, "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=server -keyout key -out asked")
    signed = "openssl x509 -req -in asked -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 -extfile names"
    _openssl(tmp_path, f"{signed} -out certificate")
    with CarelessProxy(moto_place.server.endpoint, certificate=(tmp_path / "certificate", tmp_path / "key")) as proxy:
        yield proxy.endpoint


def _openssl(place: Path, command: str) -> None:
    subprocess.run(command.split(), cwd=place, check=True, capture_output=True)


@pytest.mark.parametrize("named", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "profile", "nowhere"])
async def test_both_clients_trust_the_same_authorities(
    moto_place: Place, private: str, home: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    root, authority = root_at(moto_place, monkeypatch, endpoint=private, retry_s="1"), home / "authority.pem"
    if named == "profile":
        (home / "config").write_text(f"[default]\nca_bundle = {authority}\n")
    elif named != "nowhere":
        monkeypatch.setenv(named, str(authority))
    async with open_store(root) as store:
        if named == "nowhere":
            with pytest.raises(StoreError, match=rf"certificate of {private} is not trusted.*AWS_CA_BUNDLE"):
                await store.put("x", b"here")
            return
        await store.put("x", b"here")
        assert await unfinished_uploads_of(store) == []


def _noting(call: Callable[..., Any], asked: list[str | None]) -> Callable[..., Any]:
    def noting(self: Session) -> Any:
        asked.append(self.profile)
        return call(self)

    return noting


async def test_a_log_of_everything_has_no_secret(
    moto_place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = root_at(moto_place, monkeypatch)
    for name in ("SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", "HUSH")
    monkeypatch.setattr(logging.getLogger("botocore"), "level", logging.NOTSET)
    with caplog.at_level(logging.DEBUG):
        async with open_store(root) as store:
            await store.put("x", b"")
            assert await unfinished_uploads_of(store) == []
    assert "HUSH" not in caplog.text


def test_a_config_that_cannot_be_read_is_named(home: Path) -> None:
    (home / "config").write_text("[default\nregion")
    with pytest.raises(UsageError, match="config"):
        open_store("s3://bucket/run1")


@pytest.mark.parametrize(
    ("url", "environment", "words"),
    [
        ("az://container/run1", {}, r"az://container/run1.*Account must be specified; add \?account=NAME"),
        ("az://container/run1?account=mine", {"AZURE_STORAGE_ACCOUNT_KEY": "HUSH not base64"}, "Access Key"),
        ("gs://bucket/run1", {"GOOGLE_APPLICATION_CREDENTIALS": "/missing.json"}, "/missing.json"),
    ],
)
def test_what_the_client_refuses_is_an_error_of_use(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], words: str
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words) as caught:
        open_store(url)
    assert "HUSH" not in str(caught.value)
    assert "Debug" not in str(caught.value)
