"""Credentials for S3 from botocore: environment, profiles of ~/.aws, SSO, web identities, and roles of tasks and machines.

Without botocore, the client looks for them itself: in the environment, and for roles of tasks and machines, not in ~/.aws.
The server's address and the bucket's region are looked for here, too, so that both clients go to the same server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from checkpointd.bucket_urls import BucketUrl, credentials_for, endpoint_fault
from checkpointd.commands import install
from checkpointd.config import environment_certificates, environment_s3
from checkpointd.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_botocore_log = logging.getLogger("botocore")

_KEPT: Final = timedelta(minutes=10)
"""How long the client keeps what it was given. botocore renews what expires 15 minutes before it does."""
_REASON_MAX: Final = 300


class CredentialsError(Exception):
    """There are no credentials, or none that can be used. The clients pass its text on."""


def s3_session(profile: str | None) -> Any | None:
    """The botocore session; None if botocore is not installed. UsageError if `profile` cannot be used."""
    try:
        from botocore.exceptions import BotoCoreError, ProfileNotFound
        from botocore.session import Session
    except ImportError:
        if profile is not None:
            raise UsageError(f"profile={profile} needs botocore: {install('s3')}") from None
        return None
    if not _botocore_log.level:
        _botocore_log.setLevel(logging.INFO)  # at DEBUG it shows headers, and so the token of a session
    session = Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound as error:
        raise UsageError(f"{error}; `aws configure list-profiles` shows those that exist") from error
    except BotoCoreError as error:
        raise UsageError(f"the settings of ~/.aws cannot be used: {error}") from error
    if session.get_config_variable("metadata_service_num_attempts") == 1:  # the default; one answer may be lost
        session.set_config_variable("metadata_service_num_attempts", 3)
    return session


def s3_place(url: BucketUrl, session: Any | None) -> BucketUrl:
    """`url` with the endpoint, region and addressing of the environment, or of the profile, unless it names others. UsageError
    for an endpoint that is no URL: the clients fail over it, one of them with a panic.
    """
    found, variables = {} if session is None else _of_profile(session), environment_s3()
    options = {**found, **{option: text for option, (_, text) in variables.items()}, **url.options}
    if "endpoint" in options and (fault := endpoint_fault(options["endpoint"])):
        source = variables["endpoint"][0] if "endpoint" in variables else "endpoint_url in ~/.aws"
        raise UsageError(f"the value of {source}: {fault}")
    return replace(url, options=options)


def _of_profile(session: Any) -> dict[str, str]:
    profile = session.get_scoped_config()
    service = session.full_config.get("services", {}).get(profile.get("services"), {}).get("s3", {})
    found = {"endpoint": service.get("endpoint_url") or profile.get("endpoint_url"), "region": profile.get("region")}
    style = profile.get("s3", {}).get("addressing_style")
    found["addressing"] = style if style in {"path", "virtual"} else None
    return {option: text for option, text in found.items() if text}


def s3_authorities(session: Any | None) -> str:
    """The file of certificate authorities for S3 that the environment or the profile names; empty if they name none."""
    profile = {} if session is None else session.get_scoped_config()
    return environment_certificates()[0] or profile.get("ca_bundle", "")


def s3_client(url: BucketUrl) -> Any | None:
    """A client of botocore for what the client in Rust cannot ask; None if botocore is not installed. Its calls block."""
    session = s3_session(url.options.get("profile"))
    if session is None:
        return None
    from botocore import UNSIGNED
    from botocore.config import Config

    if not url.flag("anonymous"):
        _found(session)
    given = s3_place(url, session).options
    config = Config(
        connect_timeout=10,
        read_timeout=url.request_s,
        signature_version=UNSIGNED if url.flag("anonymous") else "s3v4",
        s3={"addressing_style": given.get("addressing", "path")},
    )
    return session.create_client(
        "s3",
        endpoint_url=given.get("endpoint"),
        region_name=given.get("region"),
        verify=s3_authorities(session) or environment_certificates()[1] or None,
        config=config,
    )


def s3_credentials(session: Any | None) -> Callable[[], S3Credential] | None:
    """Gives credentials whenever the client asks; None if botocore is not installed, so that the client looks for itself."""
    if session is None:
        return None

    def provide() -> S3Credential:
        found = _found(session)
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + _KEPT,
        }

    return provide


def _found(session: Any) -> Any:
    """The credentials now. CredentialsError if there are none, or none that could be sent."""
    try:
        credentials = session.get_credentials()
        found = credentials and credentials.get_frozen_credentials()
    except Exception as error:  # botocore has two trees of them, and a program or a file for credentials may not be there
        raise CredentialsError(f"{str(error)[:_REASON_MAX]}; {credentials_for('s3')}") from error
    if found is None:
        raise CredentialsError(
            "no credentials were found in the environment, in ~/.aws, or from a role; "
            f"{credentials_for('s3')}; for a public bucket, ?anonymous=true"
        )
    # The clients would repeat the text of what they cannot send.
    if not all((text or "").isprintable() for text in (found.access_key, found.secret_key, found.token)):
        raise CredentialsError("the credentials hold a line break or another character that cannot be sent")
    return found
