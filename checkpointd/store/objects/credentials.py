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

from checkpointd.bucket_urls import BucketUrl
from checkpointd.config import environment_certificates, environment_s3
from checkpointd.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_botocore_log = logging.getLogger("botocore")

_KEPT: Final = timedelta(minutes=10)
"""How long the client keeps what it was given. botocore renews what expires 15 minutes before it does."""
_NO_SECRETS: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile, or ?anonymous=true for a public bucket"


class CredentialsError(Exception):
    """There are no credentials. The clients pass its text on."""


def s3_session(profile: str | None) -> Any | None:
    """The botocore session; None if botocore is not installed. UsageError if `profile` cannot be used."""
    try:
        from botocore.exceptions import BotoCoreError, ProfileNotFound
        from botocore.session import Session
    except ImportError:
        if profile is not None:
            raise UsageError(f"profile={profile} needs botocore: pip install 'checkpointd[s3]'") from None
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
    return session


def s3_place(url: BucketUrl, session: Any | None) -> BucketUrl:
    """`url` with the endpoint, region and addressing of the environment, or of the profile, unless it names others."""
    found = {} if session is None else _of_profile(session)
    return replace(url, options={**found, **environment_s3(), **url.options})


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
    """The credentials now. CredentialsError if there are none, or none that could be sent; else what botocore raises."""
    credentials = session.get_credentials()
    if credentials is None:
        raise CredentialsError("no credentials were found in the environment, in ~/.aws, or from a role; " + _NO_SECRETS)
    found = credentials.get_frozen_credentials()
    # The clients would repeat the text of what they cannot send.
    if not all((text or "").isprintable() for text in (found.access_key, found.secret_key, found.token)):
        raise CredentialsError("the credentials hold a line break or another character that cannot be sent")
    return found
