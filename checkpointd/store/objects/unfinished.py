"""The unfinished multipart uploads of an S3 bucket, through botocore: the client in Rust can neither list nor abort them.

Azure forgets uploads after a week. For Google Cloud Storage, the bucket needs a lifecycle rule (docs/OBJECT_STORES.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from checkpointd.bucket_urls import BucketUrl
from checkpointd.errors import StoreError, UnreadableError
from checkpointd.store.objects.credentials import s3_client
from checkpointd.store.objects.paths import key_of, path_of
from checkpointd.store.uploads import UnfinishedUpload
from checkpointd.waits import to_the_end

log = logging.getLogger("checkpointd")
T = TypeVar("T")


class S3Uploads:
    """The unfinished uploads below the place of `url`. Its calls block a thread."""

    def __init__(self, url: BucketUrl) -> None:
        self._url = url
        self._made: Any = None

    async def found(self) -> list[UnfinishedUpload]:
        """UnreadableError if they cannot be listed, for example for want of a right."""
        return await self._on_thread("listing the unfinished uploads of", self._found, UnreadableError)

    async def abort(self, upload: UnfinishedUpload) -> None:
        await self._on_thread(f"aborting the upload of {upload.key!r} in", lambda: self._abort(upload), StoreError)

    def _found(self) -> list[UnfinishedUpload]:
        client = self._client()
        if client is None:
            log.info("unfinished uploads at %s are not looked for: botocore is not installed", self._url.url)
            return []
        prefix = path_of(self._url.prefix, "")
        pages = client.get_paginator("list_multipart_uploads").paginate(
            **self._bucket(), **({"Prefix": f"{prefix}/"} if prefix else {})
        )
        listed = (one for page in pages for one in page.get("Uploads", ()))
        return [UnfinishedUpload(key_of(self._url.prefix, one["Key"]), one["UploadId"]) for one in listed]

    def _abort(self, upload: UnfinishedUpload) -> None:
        client = self._client()
        try:
            client.abort_multipart_upload(**self._bucket(), Key=path_of(self._url.prefix, upload.key), UploadId=upload.number)
        except client.exceptions.NoSuchUpload:
            return

    def _bucket(self) -> dict[str, str]:
        return {"Bucket": self._url.bucket} | ({"RequestPayer": "requester"} if self._url.flag("requester_pays") else {})

    def _client(self) -> Any:
        if self._made is None:
            self._made = s3_client(self._url)
        return self._made

    async def _on_thread(self, doing: str, call: Callable[[], T], kind: type[StoreError]) -> T:
        try:
            return await to_the_end(asyncio.get_running_loop().run_in_executor(None, call))
        except Exception as error:  # botocore, which may not be here, has two trees of them
            raise kind(f"{doing} {self._url.url} failed: {error}") from error
