"""Which operation of S3 a request is, from its method, path and query, where buckets are in the path."""

from __future__ import annotations

from tests.servers.http_messages import RequestHead

# The first entry whose queries and headers the request has.
OF_OBJECTS: dict[str, list[tuple[set[str], str]]] = {
    "GET": [({"uploadId"}, "ListParts"), (set(), "GetObject")],
    "HEAD": [(set(), "HeadObject")],
    "PUT": [
        ({"partNumber", "uploadId", "x-amz-copy-source"}, "UploadPartCopy"),
        ({"partNumber", "uploadId"}, "UploadPart"),
        ({"x-amz-copy-source"}, "CopyObject"),
        (set(), "PutObject"),
    ],
    "POST": [({"uploads"}, "CreateMultipartUpload"), ({"uploadId"}, "CompleteMultipartUpload")],
    "DELETE": [({"uploadId"}, "AbortMultipartUpload"), (set(), "DeleteObject")],
}
OF_BUCKETS: dict[str, list[tuple[set[str], str]]] = {
    "GET": [
        ({"uploads"}, "ListMultipartUploads"),
        ({"list-type"}, "ListObjectsV2"),
        ({"location"}, "GetBucketLocation"),
        ({"versioning"}, "GetBucketVersioning"),
        ({"versions"}, "ListObjectVersions"),
        ({"lifecycle"}, "GetBucketLifecycleConfiguration"),
        (set(), "ListObjects"),
    ],
    "HEAD": [(set(), "HeadBucket")],
    "PUT": [
        ({"versioning"}, "PutBucketVersioning"),
        ({"lifecycle"}, "PutBucketLifecycleConfiguration"),
        (set(), "CreateBucket"),
    ],
    "POST": [({"delete"}, "DeleteObjects")],
    "DELETE": [({"lifecycle"}, "DeleteBucketLifecycle"), (set(), "DeleteBucket")],
}


def operation(request: RequestHead) -> str:
    """The name in Amazon's reference of the API, as `PutObject`; `Other` where it is none of those above."""
    bucket, _, key = request.path.strip("/").partition("/")
    if not bucket:
        return "ListBuckets" if request.method == "GET" else "Other"
    known = (OF_OBJECTS if key else OF_BUCKETS).get(request.method, [])
    has = request.query.keys() | request.headers.keys()
    return next((name for needed, name in known if needed <= has), "Other")
