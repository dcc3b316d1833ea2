"""Clients of S3 servers on loopback: boto3's, and the store of obstore. Neither tries again unless it is told to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.servers.s3_requests import REGION, Identity


def s3_client(endpoint: str, identity: Identity, *, retries: int = 0, timeout_s: float = 60) -> Any:
    """A client of boto3 that tries `retries` more times. It is slow to make (0.1 s): make one for several calls."""
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": retries + 1, "mode": "standard"},
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        s3={"addressing_style": "path"},
    )
    keys = {"aws_access_key_id": identity.access_key, "aws_secret_access_key": identity.secret_key}
    return boto3.client("s3", endpoint_url=endpoint, region_name=REGION, config=config, **keys)


def s3_store(
    endpoint: str, identity: Identity, bucket: str, *, prefix: str = "", retries: int = 0, timeout_s: float = 60
) -> Any:
    """A store of obstore that tries `retries` more times, soon after each other."""
    from obstore.store import S3Store

    return S3Store(
        bucket,
        prefix=prefix or None,
        endpoint=endpoint,
        region=REGION,
        access_key_id=identity.access_key,
        secret_access_key=identity.secret_key,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": timedelta(seconds=timeout_s)},
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=max(timeout_s, 1) * (retries + 1)),
            "backoff": {"init_backoff": timedelta(milliseconds=20), "max_backoff": timedelta(milliseconds=200), "base": 2},
        },
    )
