"""Errors of the object store's client as errors of the store (STORE-6)."""

from __future__ import annotations

import re
from typing import Final

from obstore import exceptions

from checkpointd.bucket_urls import credentials_for, parse
from checkpointd.errors import NotFoundError, StoreError, UnreadableError

_STATUS: Final = re.compile(r"status code: (\d{3}[^:<]*)")
_CODE: Final = re.compile(r"(?:<Code>|\(code: )([\w.]{1,100})")
"""In an answer of its own, and as the client tells it of one object in a request to delete many."""
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,300})</Message>")
_PROVIDER: Final = re.compile(r"credential provider: \w+: (.+)", re.DOTALL)
_TOKEN: Final = re.compile(r"token request|/latest/(?:api/token|meta-data)")
_SERVER: Final = re.compile(r"Error performing \w+ (https?://[^/\s]+)")
_CAUSE: Final = re.compile(r'(?:message|error): "([^"\n]{1,200})"')
"""In the dump of the client's state: why there is no connection."""
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_REASON_MAX: Final = 300
_REFUSALS: Final = ("401 ", "403 ", "(AccessDenied)")
"""How the reasons begin whose cause is a missing right."""

FAILURES: Final = (exceptions.BaseError, FileNotFoundError, OSError, ValueError)
"""What the client raises."""

_ADVICE: Final = {
    "NoSuchBucket": "there is no such bucket; make it, or correct the name",
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret key is wrong, or the clock of this machine is",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it (NTP)",
    "ExpiredToken": "the credentials have expired; get new ones",
    "AccessDenied": "the credentials may not do this; docs/OBJECT_STORES.md has the rights that checkpointd needs",
    "SlowDown": "the server asked to slow down for the whole time; use more prefixes, or fewer requests at once",
    "InvalidObjectState": "something has archived the object; restore it, and take the lifecycle rule away that does this",
    "NotImplemented": "the server does not know such requests; update it, or choose another one",
    "PermanentRedirect": "the bucket is in another region; name it: ?region=...",
    "AuthorizationHeaderMalformed": "the bucket is in another region; name it: ?region=...",
}
_CODES: Final = {
    "403": "AccessDenied",
    "429": "SlowDown",
    "503": "SlowDown",
    "TooManyRequests": "SlowDown",
    "ServiceUnavailable": "SlowDown",
}
_REDIRECT: Final = "Received redirect without LOCATION"
_ADVICE_WITHOUT_CODE: Final = {
    "InvalidCertificate": "the certificate of {server} is not trusted; name its authority's file in AWS_CA_BUNDLE (S3) or "
    "SSL_CERT_FILE",
    "dns error": "{server} was not reached, since its name is not known; the network or the endpoint may be wrong",
    "HTTP error": "{server} was not reached, or has not answered in time; the network or the endpoint may be wrong",
    "Account must be specified": "add ?account=NAME, or set AZURE_STORAGE_ACCOUNT_NAME",
    _REDIRECT: _ADVICE["PermanentRedirect"],
    "invalid path": "another program has put an object there whose name the client refuses; remove it",
}


def store_error(doing: str, key: str, url: str, error: BaseException, *, reads: bool) -> StoreError:
    """The StoreError for `error`, an UnreadableError if the request only reads."""
    reason, advice = reason_of(error)
    if _TOKEN.search(str(error)):
        advice = credentials_for(parse(url).scheme)
    words = f"{doing} {key!r} in {url} failed: {reason}" + (f": {advice}" if advice else "")
    if error.__cause__ is None and (is_forbidden(error) or _is_without_bucket(error)):
        error.__cause__ = PermissionError(reason)  # as at a file system: by this, `lasts` knows that no wait helps
    return UnreadableError(words) if reads else StoreError(words)


def missing(key: str, url: str) -> NotFoundError:
    return NotFoundError(f"there is no object {key!r} in {url}")


def is_missing(error: BaseException) -> bool:
    """Whether `error` says that the object, and not the bucket, is missing."""
    return isinstance(error, FileNotFoundError) and not _is_without_bucket(error)


def _is_without_bucket(error: BaseException) -> bool:
    return any(one in str(error) for one in _NO_BUCKET)


def is_answer(error: BaseException) -> bool:
    """Whether the server has answered with `error`, or nothing was sent. Else nobody knows what became of it."""
    if isinstance(error, ValueError | exceptions.UnauthenticatedError):
        return True
    text = str(error)
    return _STATUS.search(text) is not None or _REDIRECT in text


def is_conflict(error: BaseException) -> bool:
    """Whether the server refused the request only because another one for the same object was under way. The client calls that
    an object that exists, although there may be none.
    """
    return "409 Conflict" in str(error)


def is_past_the_end(error: BaseException) -> bool:
    """Whether `error` says that the object ends before the range that was asked for."""
    text = str(error)
    return "416 Range Not Satisfiable" in text or "InvalidRange" in text


def is_forbidden(error: BaseException | None) -> bool:
    """Whether missing rights caused `error`, so that another try cannot help."""
    while error is not None and not _is_refusal(error):
        error = error.__cause__
    return error is not None


def _is_refusal(error: BaseException) -> bool:
    """The client has classes for them, but not in listings and in requests to delete many."""
    if _PROVIDER.search(str(error)):
        return False
    known = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
    return known or (isinstance(error, exceptions.BaseError) and reason_of(error)[0].startswith(_REFUSALS))


def reason_of(error: BaseException) -> tuple[str, str]:
    """What the server said, in a line, and what to do. The client's own text ends in a dump of its state."""
    text, _, state = str(error).partition("\n\nDebug source")
    text = text.strip()
    if found := _PROVIDER.search(text):
        return found[1], ""
    status, code, message = (found[1] if (found := one.search(text)) else "" for one in (_STATUS, _CODE, _MESSAGE))
    if not code and _is_without_bucket(error):
        code = "NoSuchBucket"
    server = found[1] if (found := _SERVER.search(text)) else "the server"
    if _TOKEN.search(text):
        return f"{server} gave no token to sign requests with ({status or 'no answer'})", ""
    if not status and not code:
        last = text.rpartition("\n")[2].rpartition(" - ")[2]
        advice = next((words for sign, words in _ADVICE_WITHOUT_CODE.items() if sign in last or sign in state), "")
        cause = f" ({found[1]})" if (found := _CAUSE.search(state)) else ""
        return (last[-_REASON_MAX:] or type(error).__name__) + cause, advice.format(server=server)
    words = " ".join(one for one in (status.strip(), code and f"({code})") if one) + (f" {message}" if message else "")
    # An answer to HEAD has no body, so no code.
    return words[:_REASON_MAX], _ADVICE.get(_CODES.get(code or status[:3], code), "")
