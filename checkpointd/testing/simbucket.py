"""A simulated bucket, and its client in each simulated process. The object store runs on it as it runs on a real bucket.

The legal faults, each chosen from the seed or by `before`:
  SIMBUCKET-1  A request takes effect at one instant, as a whole or not at all. If it was answered, that instant lies between
      the call and the answer. A request that reads shows every effect before its instant, and no later one.
  SIMBUCKET-2  A listing reads one page after the other, in the order of the names. Each page has its own instant.
  SIMBUCKET-3  A request that its caller is told has failed never arrived ("lost"), or has taken effect ("unanswered"), or takes
      effect later ("late"), up to LATE_S_MAX, even if its process has died by then.
  SIMBUCKET-4  The client repeats a request that the server has put off ("slow down") or whose answer was lost ("repeated"), for
      up to `retry_s`, with pauses that grow at random. The caller sees the last answer: `create` and `replace` may return False
      although an earlier try has written the object. A try that its repetition has overtaken ("overtaken") may still take
      effect after the caller has its answer, up to LATE_S_MAX later (BUCKET-4).
  SIMBUCKET-5  The bucket may be out of reach for a while, for any share of the requests (`Trouble`).
  SIMBUCKET-6  An upload becomes visible as a whole when it is completed, or never. Its parts arrive in any order, some of them
      slowly. If an upload fails, the client aborts it, which may fail, too. A process that dies leaves it unfinished. A
      repeated completion fails, since the first one has ended the upload.
  SIMBUCKET-7  A removal of several objects is one request for each, in any order. If it fails, any of them may be gone.
  SIMBUCKET-8  Requests may be refused because rights are missing ("denied"): at once, without an effect or a repetition.
  SIMBUCKET-9  What has taken effect is durable. A power cut ends processes, and takes nothing from the bucket.
  SIMBUCKET-10  A request on its way when its process dies arrives or does not. A paused process's requests arrive.
  SIMBUCKET-11  Every effect (create, replace, put, begin, part, complete, abort, delete) has a number, counted from 1 over all
      processes. Just after any of them, `after` may kill, pause or cut the power.
Only tasks of the process that owns a client may call it (`Process.spawn`); any other call is a mistake in the test.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, TypeVar

from typing_extensions import Buffer

from checkpointd.errors import StoreError, UnreadableError
from checkpointd.store.base import Entry
from checkpointd.store.objects.bucket import Bucket, ObjectHead, Version
from checkpointd.store.objects.failures import missing
from checkpointd.store.requests import Requests
from checkpointd.store.uploads import UnfinishedUpload
from checkpointd.testing.simloop import Process, ProcessState, current_process
from checkpointd.testing.simobjects import SimObject, SimObjects
from checkpointd.testing.simstorage import SimStorage

T = TypeVar("T")

Fate: TypeAlias = Literal["served", "lost", "unanswered", "late", "repeated", "overtaken", "slow down", "denied"]
"""What happens to one try of a request; SIMBUCKET-3, -4 and -8 say what each means."""
AGAIN: Final[frozenset[Fate]] = frozenset({"repeated", "overtaken", "slow down"})
"""After these, the client tries again. After the others, the caller is told that the request has failed."""
LATE: Final[frozenset[Fate]] = frozenset({"late", "overtaken"})
READS: Final = frozenset({"get", "look", "list", "uploads"})

ANSWER_S_MAX: Final = 1.0
"""How long a client waits for an answer that does not come."""
LATE_S_MAX: Final = 60.0
RETRY_S: Final = 4.0
PAUSE_S_MIN, PAUSE_S_MAX = 0.1, 2.0
"""The shortest and the longest pause before a repetition."""
PARTS_AT_ONCE: Final = 8
PAGE: Final = 1000
SLOW_S: Final = 2.0
"""A call that its repetitions make longer than this counts as hindered."""


@dataclass(slots=True, eq=False)
class Request:
    """One try of a request: `data` is what it carries, as long as its caller keeps it."""

    process: str
    kind: str
    key: str
    data: Buffer | None = None
    leaves: bool = True
    """Whether it arrives if its process dies meanwhile (SIMBUCKET-10)."""

    def payload(self) -> bytes:
        """The bytes at the time of the effect, and not of the call: so a caller that changes them too early is noticed."""
        return b"" if self.data is None else bytes(self.data)

    def seal(self) -> None:
        """Copy the bytes, since the caller may change them from now on."""
        self.data = None if self.data is None else bytes(self.data)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Until the time `until`, the tries of `process` (empty: of all) meet `fate`, or at least a `share` of them."""

    until: float
    fate: Fate
    share: float = 1.0
    process: str = ""


class SimBucket(SimStorage):
    """The bucket of one simulated run, shared by its processes. Make it inside the run, on its SimLoop.

    `weather`: the share of the tries that meet each fate; of those in AGAIN, no caller notices more than that they take longer.
    `page`: the number of names in a page of a listing. `numbered` as in SimObjects.
    """

    def __init__(
        self,
        *,
        numbered: bool = False,
        page: int = PAGE,
        weather: Mapping[Fate, float] = MappingProxyType({}),
        retry_s: float = RETRY_S,
    ) -> None:
        super().__init__("bucket")
        self.state = SimObjects(numbered=numbered)
        self.page, self.weather, self.retry_s = page, weather, retry_s
        self.troubles: list[Trouble] = []
        self._lost_s: defaultdict[str, float] = defaultdict(float)
        self.before: Callable[[Request], Fate | None] = lambda _: None
        """Called just before each try; the fate that it returns is that of the try."""
        self.hindered: Callable[[str], None] = lambda _: None
        """Called with the name of a process of which a request has failed, or had to be repeated for more than SLOW_S."""

    def process(self, name: str, kind: type[SimClient] | None = None) -> SimClient:
        """A new process, and its client, of class `kind`. It may take the name of a dead process."""
        return (kind or SimClient)(self, self._new_process(name))

    def fate(self, request: Request) -> Fate:
        """The fate of the next try."""
        if (chosen := self.before(request)) is not None:
            return chosen
        if self.troubles:
            now = self.loop.time()
            self.troubles = [trouble for trouble in self.troubles if trouble.until > now]
        for trouble in self.troubles:
            if trouble.process in ("", request.process) and self.rng.random() < trouble.share:
                return trouble.fate
        draw = self.rng.random()
        for fate, share in self.weather.items():
            if (draw := draw - share) < 0:
                return fate
        return "served"

    def lost_s(self, name: str) -> float:
        return self._lost_s[name]

    def note_loss(self, name: str, seconds: float) -> None:
        """A try of the process `name` has failed after so many seconds, the pause before the next one included."""
        self._lost_s[name] += seconds

    def send(self, request: Request, act: Callable[[bytes], T], process: Process | None, *, late: bool) -> asyncio.Future[T]:
        """Let `request` arrive and be carried out by `act`, in any case and without its process. Returns what `act` gives."""
        answer: asyncio.Future[T] = self.loop.create_future()
        request.leaves = late or self.rng.random() < 0.5
        delay_s = self.late_s() if late else self.delay_s(request.kind)
        self.loop.call_later(delay_s, self._arrive, request, act, process, answer, context=Context())
        return answer

    def _arrive(self, request: Request, act: Callable[[bytes], T], process: Process | None, answer: asyncio.Future[T]) -> None:
        if process is not None and process.state is ProcessState.DEAD and not request.leaves:
            return
        data = request.payload()
        request.data = None
        if request.kind in READS:
            result = act(data)
        else:
            effect = self.record(request.process, request.kind, request.key, len(data))
            result = act(data)
            self.after(effect, result is not False)
        self.loop.answer_later(self.delay_s(), answer, result)

    def delay_s(self, kind: str = "") -> float:
        """Mostly below 20 ms, now and then up to 300 ms, rarely up to 2 s; for parts of uploads more often."""
        draw = self.rng.random() ** (4 if kind == "part" else 1)
        scale = 0.02 if draw > 0.06 else 0.3 if draw > 0.005 else 2.0
        return scale * self.rng.random()

    def late_s(self) -> float:
        """Mostly below 3 s, now and then up to LATE_S_MAX."""
        return (3.0 if self.rng.random() < 0.7 else LATE_S_MAX) * self.rng.random()


class _FailedError(Exception):
    """A try that has failed. `again`: the client tries again."""

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


_REASONS: Final[dict[Fate, str]] = {
    "slow down": "503 Service Unavailable (SlowDown)",
    "denied": "403 Forbidden (AccessDenied)",
}
_DOING: Final = {
    "get": "reading",
    "look": "looking for",
    "list": "listing",
    "uploads": "listing the uploads below",
    "delete": "removing",
}
_NO_ANSWER: Final = "the server has not answered in time"


def _empty(act: Callable[[], T]) -> Callable[[bytes], T]:
    """What a request does that carries no data."""
    return lambda _: act()


class SimClient(Bucket):
    """The bucket as one process sees it; without a process, as tasks see it that belong to none."""

    def __init__(self, bucket: SimBucket, process: Process | None = None) -> None:
        self.bucket = bucket
        self._process = process
        self._state = bucket.state
        self._requests = Requests()

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def url(self) -> str:
        return "sim://bucket"

    @property
    def requests(self) -> Requests:
        return self._requests

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        self._requests.puts += 1
        return await self._request("create", key, lambda body: self._state.create(key, body, mark), data)

    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        self._requests.puts += 1
        return await self._request("replace", key, lambda body: self._state.replace(key, body, version, mark), data)

    async def put(self, key: str, data: Buffer) -> None:
        self._requests.puts += 1
        await self._request("put", key, lambda body: self._state.put(key, body), data)

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        self._requests.puts += 2
        upload = await self._request("begin", key, lambda _: self._state.begin(key, self._name))
        try:
            count = await self._send_parts(upload, key, parts, part_bytes)
            if not await self._request("complete", key, lambda _: self._state.complete(upload, count)):
                raise self._error("complete", key, "404 Not Found (NoSuchUpload)")
        except Exception:
            await self._give_up(upload, key)
            raise

    async def _send_parts(self, upload: int, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> int:
        """Send all parts, several at once, and keep none that the server has. Returns their number."""
        sending: set[asyncio.Task[None]] = set()
        count, shorter = 0, False
        try:
            async for part in parts:
                assert not shorter, "only the last part may be shorter"
                shorter = memoryview(part).nbytes != part_bytes
                sending.add(asyncio.ensure_future(self._send_part(upload, key, count, [part])))
                del part
                count += 1
                if len(sending) == PARTS_AT_ONCE:
                    ended, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                    for one in ended:
                        one.result()
            await asyncio.gather(*sending)
        finally:
            for one in sending:
                one.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        return count

    async def _send_part(self, upload: int, key: str, number: int, part: list[Buffer]) -> None:
        self._requests.parts += 1
        act = self._state.part
        if not await self._request("part", key, lambda body: act(upload, number, body), part.pop()):
            raise self._error("part", key, "404 Not Found (NoSuchUpload)")

    async def _give_up(self, upload: int, key: str) -> None:
        """If this fails as well, the upload stays unfinished (SIMBUCKET-6)."""
        try:
            await self.abort(UnfinishedUpload(key, str(upload)))
        except StoreError as error:
            self.bucket.note(f"{self._name} leaves an upload of {key} unfinished: {error}")

    async def get(self, key: str, size_max: int) -> tuple[bytes, ObjectHead] | int:
        found = await self._get(key)
        return len(found.data) if len(found.data) > size_max else (found.data, found.head)

    async def get_range(self, key: str, offset: int, nbytes: int) -> Buffer:
        return (await self._get(key)).data[offset : offset + nbytes]

    async def _get(self, key: str) -> SimObject:
        self._requests.gets += 1
        found = await self._request("get", key, lambda _: self._state.objects.get(key))
        if found is None:
            raise missing(key, self.url)
        return found

    async def look(self, key: str) -> ObjectHead | None:
        self._requests.heads += 1
        found = await self._request("look", key, lambda _: self._state.objects.get(key))
        return None if found is None else found.head

    async def list(self, prefix: str) -> list[Entry]:
        found: list[Entry] = []
        after: str | None = ""
        while after is not None:
            self._requests.lists += 1
            read = partial(self._state.page, prefix, after, self.bucket.page)
            page, after = await self._request("list", prefix, _empty(read))
            found += page
        return sorted(found, key=lambda entry: entry.name)

    async def delete(self, keys: Sequence[str]) -> None:
        self._requests.deletes += 1
        removed = [self._request("delete", key, _empty(partial(self._state.delete, key))) for key in keys]
        failed = [one for one in await asyncio.gather(*removed, return_exceptions=True) if isinstance(one, BaseException)]
        if failed:
            raise failed[0]

    async def unfinished(self) -> Sequence[UnfinishedUpload]:
        self._requests.lists += 1
        found = await self._request("uploads", "", _empty(self._state.uploads.copy))
        return [UnfinishedUpload(upload.key, str(number)) for number, upload in found.items()]

    async def abort(self, upload: UnfinishedUpload) -> None:
        self._requests.deletes += 1
        await self._request("abort", upload.key, _empty(partial(self._state.abort, int(upload.number))))

    async def close(self) -> None:
        """Nothing to release."""

    # --- how a request runs --------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return "" if self._process is None else self._process.name

    async def _request(self, kind: str, key: str, act: Callable[[bytes], T], data: Buffer | None = None) -> T:
        """The answer to the last try (SIMBUCKET-4)."""
        loop, bucket = self.bucket.loop, self.bucket
        request = Request(self._name, kind, key, data)
        del data
        began, pause_s = loop.time(), PAUSE_S_MIN
        try:
            while True:
                self._check()
                tried = loop.time()
                try:
                    return await self._try(request, act)
                except _FailedError as failed:
                    if not failed.again or loop.time() - began + pause_s > bucket.retry_s:
                        bucket.hindered(self._name)
                        raise self._error(kind, key, str(failed)) from None
                await loop.elapse(pause_s)
                bucket.note_loss(self._name, loop.time() - tried)
                pause_s = min(bucket.rng.uniform(PAUSE_S_MIN, 2 * pause_s), PAUSE_S_MAX)
                if loop.time() - began > SLOW_S:
                    bucket.hindered(self._name)
        finally:
            request.data = None  # so that no frame keeps a part

    async def _try(self, request: Request, act: Callable[[bytes], T]) -> T:
        """The answer to one try, which is carried out at most once."""
        bucket = self.bucket
        fate = bucket.fate(request)
        if fate != "served":
            bucket.note(f"{request.process}: {request.kind} of {request.key}: {fate}")
        sent = Request(request.process, request.kind, request.key, request.data)
        try:
            if fate in _REASONS:
                await bucket.loop.elapse(bucket.delay_s())
                raise _FailedError(_REASONS[fate], again=fate in AGAIN)
            answer = None if fate == "lost" else bucket.send(sent, act, self._process, late=fate in LATE)
            if answer is not None and fate not in LATE:
                result = await answer
                if fate == "served":
                    return result
            await bucket.loop.elapse(bucket.rng.random() * ANSWER_S_MAX)
            raise _FailedError(_NO_ANSWER, again=fate in AGAIN)
        finally:
            sent.seal()

    def _error(self, kind: str, key: str, reason: str) -> StoreError:
        doing = _DOING.get(kind, "writing")
        words = f"{doing} {key!r} in {self.url} failed: {reason}"
        return UnreadableError(words) if kind in READS else StoreError(words)

    def _check(self) -> None:
        if self.bucket.loop.closing:
            raise asyncio.CancelledError
        if current_process() is not self._process:
            raise RuntimeError(f"a task outside process {self._name!r} uses its client: start it with spawn")


FAR_S_MAX: Final = 0.3


class FarClient(SimClient):
    """The bucket as a distant process sees it: every try takes up to FAR_S_MAX longer, so much happens between two calls."""

    async def _try(self, request: Request, act: Callable[[bytes], T]) -> T:
        await self.bucket.loop.elapse(self.bucket.rng.random() * FAR_S_MAX)
        return await super()._try(request, act)
