"""What the URL of a bucket says: where the bucket is, and how to reach it.

Invariant: a URL holds no secret, and no message repeats one. URLs stand in logs, statuses and messages to the sidecar, so
credentials come from the environment or from the provider's own files and services.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from checkpointd.errors import UsageError

Scheme: TypeAlias = Literal["s3", "gs", "az"]

SCHEMES: Final[Mapping[str, Scheme]] = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "azure": "az"}
PROVIDERS: Final[Mapping[Scheme, str]] = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}

RETRY_S: Final = 120.0
"""How long a request is repeated that gets no answer, or the answer to slow down. Well below the timeout of a commit."""
REQUEST_S: Final = 60.0
"""How long one request may take, its bytes included."""

_REMAINS: Final = re.compile(rf"(?:\A|/)(?:{'|'.join((*SCHEMES, 'file'))}):(?:/|\Z)", re.IGNORECASE)
"""What pathlib and os.path leave of a URL."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]\Z")
_SECRET: Final = re.compile(r"secret|token|password|access_?key|account_?key|sas|credential|signature", re.IGNORECASE)
_PARTS_REFUSED: Final = frozenset({"", ".", ".."})
_BOOLS: Final = {"true": True, "false": False}

OPTIONS: Final[Mapping[str, str]] = {
    "endpoint": "the server's address, such as http://10.0.0.5:9000, if it is not the provider's own",
    "region": "the bucket's region, such as eu-west-1",
    "addressing": "`path` (endpoint/bucket) or `virtual` (bucket.endpoint)",
    "anonymous": "`true`: send requests without credentials, for public buckets",
    "profile": "the profile of ~/.aws to take credentials from",
    "account": "the storage account of an az:// container",
    "encryption": "the provider's encryption at rest: `AES256`, `aws:kms` or `aws:kms:dsse`",
    "kms_key": "the key for `encryption=aws:kms`",
    "checksum": "`sha256` or `crc64nvme`: the server checks each upload",
    "requester_pays": "`true`: this side pays for the requests",
    "retry_s": f"how many seconds a request is repeated that gets no answer (default {RETRY_S:g})",
    "request_s": f"how many seconds one request may take (default {REQUEST_S:g})",
}
"""The options of a URL's query, with their meanings."""
_WHERE: Final[frozenset[str]] = frozenset({"endpoint", "account"})
"""The options that say where a bucket is. The others say how it is reached and written."""
_OF: Final[Mapping[str, frozenset[str]]] = {
    "s3": frozenset(OPTIONS) - {"account"},
    "gs": frozenset({"endpoint", "anonymous", "retry_s", "request_s"}),
    "az": frozenset({"endpoint", "account", "anonymous", "retry_s", "request_s"}),
}


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """A bucket and the prefix in it, with the options of the URL."""

    scheme: Scheme
    bucket: str
    prefix: str
    options: Mapping[str, str]

    @property
    def place(self) -> str:
        """The URL without options."""
        return f"{self.scheme}://{self.bucket}" + (f"/{quote(self.prefix)}" if self.prefix else "")

    @property
    def url(self) -> str:
        """The URL in its one spelling: it opens the same place again."""
        query = urlencode(sorted(self.options.items()), safe=":/")
        return f"{self.place}?{query}" if query else self.place

    @property
    def identity(self) -> str:
        """The URL with the options alone without which it would be another place."""
        return replace(self, options={name: value for name, value in self.options.items() if name in _WHERE}).url

    @property
    def retry_s(self) -> float:
        return float(self.options.get("retry_s", RETRY_S))

    @property
    def request_s(self) -> float:
        return float(self.options.get("request_s", REQUEST_S))

    def holds(self, other: BucketUrl) -> bool:
        """Whether `other` is this place, or lies below it."""
        same = (self.scheme, self.bucket) == (other.scheme, other.bucket)
        return same and (not self.prefix or f"{other.prefix}/".startswith(f"{self.prefix}/"))

    def below(self, name: str) -> BucketUrl:
        """The place `name` in this one."""
        return replace(self, prefix=f"{self.prefix}/{name}" if self.prefix else name)

    def trying_for(self, retry_s: float) -> BucketUrl:
        """The same place; a request that gets no answer is repeated for `retry_s` seconds, unless the URL says otherwise."""
        return replace(self, options={"retry_s": f"{retry_s:g}", **self.options})

    def flag(self, name: str) -> bool:
        """The option `name`, which is `true` or `false`; False if it is not given."""
        return _BOOLS[self.options.get(name, "false")]


def is_bucket_url(text: str) -> bool:
    """Whether `text` is the URL of a bucket. UsageError for what is left of a URL: it would be a directory of an odd name."""
    if "://" not in text and (left := _REMAINS.search(text)):
        raise UsageError(
            f"{left[0].strip('/')!r} would be the name of a directory: a URL has two slashes, as in s3://bucket/path; give it "
            "as a string, since pathlib.Path and os.path.abspath take one away. No directory of a path may have this name"
        )
    return "://" in text and text.partition("://")[0].lower() in SCHEMES


def was_url(path: str) -> bool:
    """Whether `path` is a URL, or was one before pathlib or os.path made a path of it."""
    return _REMAINS.search(path) is not None


def one_spelling(root: str) -> str:
    """`root` as it is shown and compared: the URL of a bucket, or an absolute path."""
    return parse(root).url if is_bucket_url(root) else os.path.abspath(root)


def is_same_root(one: str, other: str) -> bool:
    """Whether both are the same path, or the same place in a bucket, perhaps with different options."""
    if is_bucket_url(one) and is_bucket_url(other):
        return parse(one).place == parse(other).place
    return one == other


def directory_of(url: str) -> str | None:
    """The directory of the store at `url`; None if it is not in a file system."""
    return None if "://" in url else url


def parse(text: str) -> BucketUrl:
    """The place that the URL `text` names. UsageError says what is wrong with it, without repeating a secret."""
    scheme, seen = SCHEMES[text.partition("://")[0].lower()], shown(text)
    url = _split(text)
    if url is None or _has_credentials(url):
        raise UsageError(f"{seen}: a URL must not hold credentials, because it stands in logs; {credentials_for(scheme)}")
    if url.fragment:
        raise UsageError(f"{seen}: a '#' ends the URL; write it as %23 if it belongs to the path")
    if not _BUCKET.match(url.netloc):
        raise UsageError(
            f"{seen}: {url.netloc!r} is not the name of a bucket: write {url.scheme}://bucket/path, the name in lower case"
            + (", and the server as ?endpoint=http://host:port" if ":" in url.netloc else "")
        )
    prefix = unquote(url.path).strip("/")
    if prefix and not _PARTS_REFUSED.isdisjoint(prefix.split("/")):
        raise UsageError(f"{seen}: {prefix!r} cannot be the path of a root in a bucket: no part is empty, '.' or '..'")
    return BucketUrl(scheme, url.netloc, prefix, _options(scheme, url.query, seen))


def _options(scheme: Scheme, query: str, seen: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OF[scheme]:
            if _SECRET.search(name):
                raise UsageError(
                    f"{seen}: {name} does not belong in a URL, because it stands in logs; {credentials_for(scheme)}"
                )
            raise UsageError(
                f"{seen}: there is no option {name!r} for {scheme}:// URLs; there are {', '.join(sorted(_OF[scheme]))}"
            )
        if name in found:
            raise UsageError(f"{seen}: {name} is given twice")
        fault = _fault(name, value)
        if fault:
            raise UsageError(f"{seen}: the value of {name}: {fault}")
        found[name] = value
    return found


def _fault(name: str, value: str) -> str | None:
    if name in {"retry_s", "request_s"}:
        try:
            return None if 0 < float(value) < 3600 else "give a number of seconds above 0 and below 3600"
        except ValueError:
            return "give a number of seconds"
    if name in {"anonymous", "requester_pays"}:
        return None if value in _BOOLS else "give true or false"
    if name == "addressing":
        return None if value in {"path", "virtual"} else "give path or virtual"
    if name == "checksum":
        return None if value in {"sha256", "crc64nvme"} else "give sha256 or crc64nvme"
    if name == "endpoint":
        return endpoint_fault(value)
    return None if value else "it is empty"


def endpoint_fault(value: str) -> str | None:
    """What is wrong with an address of a server, without repeating it; None if nothing is."""
    url = _split(value)
    is_right = url is not None and url.scheme in {"http", "https"} and url.netloc and not _has_credentials(url)
    if is_right and "?" not in value and "#" not in value:
        return None
    return "give a URL such as https://minio.example.com:9000, without credentials and options"


def credentials_for(scheme: Scheme) -> str:
    """How to give credentials, as advice."""
    return {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile or a role",
        "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or use the machine's service account",
        "az": "set AZURE_STORAGE_ACCOUNT_KEY, or use a managed identity",
    }[scheme]


def shown(text: str) -> str:
    """The URL `text` without its query and without credentials, for messages."""
    url = _split(text)
    if url is None or _has_credentials(url):
        return repr(f"{text.partition('://')[0]}://...")
    return repr(f"{url.scheme}://{url.netloc}{url.path}")


def _split(text: str) -> SplitResult | None:
    """The parts of a URL; None if it has none, as one with a bracket in its password."""
    try:
        return urlsplit(text)
    except ValueError:
        return None


def _has_credentials(url: SplitResult) -> bool:
    """A secret may hold the signs that end the host of a URL: `key:se/cret@bucket`."""
    return "@" in url.netloc or (":" in url.netloc and "@" in url.geturl())
