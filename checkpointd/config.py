"""Settings as frozen, keyword-only dataclasses that refuse bad combinations. The only reader of the environment."""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from checkpointd import arguments, memory_limit
from checkpointd.bucket_urls import is_bucket_url, parse, was_url
from checkpointd.codec import Compression
from checkpointd.commit.decide import OnNoProgress
from checkpointd.commit.retention import Retention
from checkpointd.errors import UsageError
from checkpointd.phrases import byte_count
from checkpointd.system_errors import in_words
from checkpointd.waits import ABSENCE_S as ABSENCE_S

MIB = 1 << 20
PINNED_BYTES = 256 * MIB
EXPORT_BYTES_MIN = 16 * MIB
"""The least memory of an export."""
SOCKET_PATH_BYTES_MAX = 107
"""The longest path of a Unix socket that Linux takes."""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} is {value!r}; it must be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistConfig:
    """How one shard is encoded and written. Sizes in bytes."""

    compression: Compression = "auto"
    chunk_bytes: int = 4 * MIB
    """The most raw bytes in one chunk."""
    block_bytes: int = 8 * MIB
    """The bytes of one write; a multiple of the page size."""
    writes: int = 4
    """Writes in flight at once."""
    encoders: int = field(default_factory=lambda: max(1, min(4, (os.cpu_count() or 2) - 1)))
    """Chunks that are encoded at once, each on a thread."""
    budget_bytes: int = 256 * MIB
    """The most host memory beside the snapshot, for a state of any size."""
    dedup: bool = True
    """Whether to store references in place of chunks that have not changed since the newest checkpoint."""
    full_every: int | None = None
    """Every so many checkpoints, one is stored in full. The chunks of those between may be stored as differences from it. None:
    there are no differences."""

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "block_bytes", "writes", "encoders", "budget_bytes"):
            arguments.whole(name, getattr(self, name), most=sys.maxsize)
        arguments.choice("compression", self.compression, get_args(Compression))
        arguments.flag("dedup", self.dedup)
        if self.full_every is not None:
            arguments.whole("full_every", self.full_every, least=2, most=sys.maxsize)
            if self.compression == "none":
                raise UsageError(
                    f'full_every={self.full_every} stores differences, which are compressed; choose compression="auto" with it'
                )
        if self.chunk_bytes < 4096 or self.chunk_bytes > 1 << 30:
            raise UsageError(f"chunk_bytes is {self.chunk_bytes}; choose 4 KiB to 1 GiB (4 MiB is a good size)")
        if self.block_bytes % 4096:
            raise UsageError(f"block_bytes is {self.block_bytes}; it must be a multiple of 4096")
        least = self.block_bytes * 2 + self.chunk_bytes * 4
        if self.budget_bytes < least:
            raise UsageError(f"budget_bytes is {self.budget_bytes}; with these chunks and blocks at least {least} are needed")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitConfig:
    """How long the ranks wait for each other. Seconds, measured on each rank's own monotonic clock."""

    timeout_s: float = 600.0
    """The time from a rank's save() until it gives the attempt up."""
    poll_min_s: float = 0.01
    poll_max_s: float = 0.25
    retention: Retention = field(default_factory=Retention)
    """Which checkpoints stay; the coordinator removes the others after a commit."""
    on_no_progress: OnNoProgress = "warn"
    """The reaction if the step moved on, but no trained tensor of any rank changed."""
    read_back: bool = True
    """Whether to read committed checkpoints back while no save is in flight."""

    def __post_init__(self) -> None:
        arguments.seconds("timeout_s", self.timeout_s, most=arguments.TIMEOUT_S_MAX)
        arguments.seconds("poll_min_s", self.poll_min_s)
        arguments.choice("on_no_progress", self.on_no_progress, get_args(OnNoProgress))
        if self.poll_max_s < self.poll_min_s:
            raise UsageError(f"poll_max_s ({self.poll_max_s}) is below poll_min_s ({self.poll_min_s})")


SpoolKeep = Literal["all", "newest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolConfig:
    """A spool: a directory on this node's own disk, in which snapshots become durable before they are uploaded to the root."""

    directory: str
    bytes_max: int | None = None
    """The most bytes in the spool; None: all of the disk but a reserve. A save that finds no room goes to the root."""
    keep: SpoolKeep = "all"
    """`all`: every save is uploaded, the newest first. `newest`: a save whose upload has not begun is dropped once a newer one
    has committed, unless it is `required` or retention would keep it for good."""
    bandwidth_bps: float | None = None
    """The most bytes per second that all uploads together may send; None: no limit."""
    timeout_s: float = 86_400.0
    """The time from the moment when a save is in the spool until its rank gives it up."""
    retain: bool = True
    """Whether the newest committed save stays in the spool, so that a restart reads it from there. It goes when its room is
    needed."""
    finish: bool = False
    """Whether a daemon that is told to leave uploads what it can within its grace, without limit."""

    def __post_init__(self) -> None:
        arguments.path("spool", self.directory)
        if was_url(os.fspath(self.directory)):
            raise UsageError(f"the spool {self.directory!r} must be a directory on this node's own disk, not a URL")
        object.__setattr__(self, "directory", os.path.abspath(self.directory))
        arguments.choice("spool_keep", self.keep, get_args(SpoolKeep))
        arguments.seconds("spool_timeout_s", self.timeout_s, most=arguments.TIMEOUT_S_MAX)
        if self.bytes_max is not None:
            arguments.whole("spool_bytes_max", self.bytes_max, most=sys.maxsize)
        if self.bandwidth_bps is not None and not self.bandwidth_bps > 0:
            raise UsageError(f"spool_bandwidth_bps is {self.bandwidth_bps!r}; it must be greater than 0")


def spool_of(given: str | os.PathLike[str] | SpoolConfig | None) -> SpoolConfig | None:
    """The spool that `spool=` of a Checkpointer stands for: its directory, all of its settings, or None."""
    if given is None or isinstance(given, SpoolConfig):
        return given
    arguments.path("spool", given)
    return SpoolConfig(directory=os.fspath(given))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process's place in the job."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} does not exist in a world of {self.world_size}")


def environment_root() -> str | None:
    """The root for commands without one: CHECKPOINTD_ROOT."""
    return os.environ.get("CHECKPOINTD_ROOT") or None


def environment_job() -> str:
    """The name that shows that two starts belong to one job; empty if the environment has none.

    It is CHECKPOINTD_JOB, which users may set, or otherwise the name that torchrun (`--rdzv-id`, unless it is the default) or
    Slurm gives the job, which both keep when they start the job again.
    """
    if job := os.environ.get("CHECKPOINTD_JOB"):
        return job
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run and run != "none":
        return f"torchrun {run}"
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"slurm {array}_{task}"
    slurm = os.environ.get("SLURM_JOB_ID")
    return f"slurm {slurm}" if slurm else ""


def environment_s3() -> dict[str, tuple[str, str]]:
    """The `endpoint` and the `region` of S3, as far as the environment names them: the variable of each, and its value."""
    names = {
        "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    }
    found = {option: next(filter(os.environ.get, given), "") for option, given in names.items()}
    return {option: (name, os.environ[name]) for option, name in found.items() if name}


def environment_certificates() -> tuple[str, str]:
    """The files of certificate authorities that the environment names: for S3, and for all; each empty if it names none."""
    return os.environ.get("AWS_CA_BUNDLE", ""), os.environ.get("SSL_CERT_FILE", "")


JOB_CHARACTERS_MAX = 200


def check_job(job: str | None) -> str:
    """The job's name: `job`, or the name in the environment if it is None. UsageError if `job` cannot be a name."""
    if job is None:
        return environment_job()[:JOB_CHARACTERS_MAX]
    if type(job) is not str or not 0 < len(job) <= JOB_CHARACTERS_MAX or not job.isprintable():
        raise UsageError(f"job is {job!r}; it must be a name of 1 to {JOB_CHARACTERS_MAX} printable characters, or None")
    return job


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """How a shard is read. Sizes in bytes."""

    reads: int = 4
    """Reads in flight at once."""
    block_bytes: int = 4 * MIB
    """Neighbouring chunks are read together up to this size."""
    budget_bytes: int = 256 * MIB
    """The most host memory beside the load targets. A chunk that needs more is read alone."""
    retry_s: float = 600.0
    """How long a failed read is tried again, from the first failure on, before it raises UnreadableError."""
    absence_s: float = ABSENCE_S
    """How long a needed object must be missing before it counts as lost: longer than a file server lags."""
    pinned_bytes: int = PINNED_BYTES
    """The most host memory that the client pins for the copies to devices, beside `budget_bytes`."""

    def __post_init__(self) -> None:
        arguments.whole("pinned_bytes", self.pinned_bytes, least=0, most=sys.maxsize)
        _positive(reads=self.reads, block_bytes=self.block_bytes, budget_bytes=self.budget_bytes)
        if not (self.retry_s >= 0 and self.absence_s >= 0):
            raise UsageError(f"retry_s is {self.retry_s!r} and absence_s {self.absence_s!r}; neither can be negative")


def environment_world_size() -> int:
    """The number of ranks that the launcher started: WORLD_SIZE, or 1 if that is not a number."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Settings that systemd passes to this process: sd_notify(3) and sd_watchdog_enabled(3)."""

    notify_socket: str | None = None
    watchdog_s: float | None = None
    watchdog_pid: int | None = None


def credential_places() -> list[str]:
    """The files and directories in which the clients of object stores look for credentials and certificates."""
    named = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CA_BUNDLE", "SSL_CERT_FILE")
    others = ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_FEDERATED_TOKEN_FILE")
    usual = (os.path.expanduser(place) for place in ("~/.aws", "~/.config/gcloud", "~/.azure"))
    secrets = ("/var/run/secrets", "/run/secrets", "/run/systemd/resolve")
    return [*filter(None, map(os.environ.get, (*named, *others))), *usual, *secrets]


def scratch_directories() -> tuple[str, ...]:
    """Directories of this node alone, for a socket: XDG_RUNTIME_DIR, then those of the job, then the system's."""
    named = map(os.environ.get, ("XDG_RUNTIME_DIR", "SLURM_TMPDIR", "TMPDIR"))
    return (*(place for place in named if place and os.path.isabs(place)), "/tmp")


def environment_of_daemon(imports: str) -> dict[str, str]:
    """The environment of a daemon that this process starts: what finds its programs, libraries and buckets, and nothing that is
    meant for the training. `imports`: a directory of modules that Python does not look in by itself, or empty.
    """
    names = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    kept = {*names, *proxies, *map(str.lower, proxies)}
    clouds = ("AWS_", "GOOGLE_", "AZURE_")
    found = {name: value for name, value in os.environ.items() if name in kept or name.startswith(clouds)}
    return found | ({"PYTHONPATH": imports} if imports else {})


def environment_watched() -> Watched:
    """NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, each if it is set and valid."""
    period, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return Watched(
        notify_socket=os.environ.get("NOTIFY_SOCKET") or None,
        watchdog_s=int(period) / 1e6 if period.isdecimal() and int(period) > 0 else None,
        watchdog_pid=int(pid) if pid.isdecimal() else None,
    )


def read_serve_file(path: str) -> dict[str, object]:
    """The table `[serve]` of a TOML file: fields of ServeConfig by name. UsageError if it cannot be read or has other names."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read: {in_words(error, 'file')}") from error
    except ValueError as error:
        raise UsageError(f"the configuration {path} is not TOML: {error}") from error
    table = found.pop("serve", None)
    if not isinstance(table, dict) or found:
        raise UsageError(f"the configuration {path} must have one table, [serve], and nothing else")
    known = {f.name for f in fields(ServeConfig)}
    strange = sorted(set(table) - known)
    if strange:
        raise UsageError(f"the configuration {path} names {', '.join(strange)}; there are {', '.join(sorted(known))}")
    for name, kind in (("mirrors", ServedMirror), ("exports", ServedExport)):
        for given in table.get(name, []):
            keys = {f.name for f in fields(kind)}
            other = sorted(set(given) - keys) if isinstance(given, dict) else []
            if other:
                raise UsageError(
                    f"the configuration {path} names {', '.join(other)} in {name}; there are {', '.join(sorted(keys))}"
                )
            if kind is ServedExport and isinstance(given, dict) and "dtype" in given:
                arguments.choice("dtype", given["dtype"], get_args(ExportDType))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedMirror:
    """A root that the daemon mirrors to another one. Each is an absolute path or the URL of a store. The rules are those of
    `Retention`, for the mirror.
    """

    origin: str
    mirror: str
    keep_last: int | None = None
    every_steps: int | None = None
    younger_than_s: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    everything: bool = False
    """Whether checkpoints are copied that the rules would remove again at once."""
    verify: bool = False
    """Whether each checkpoint is read back from the mirror after it was copied."""
    limit_bps: float | None = None
    """The most bytes per second that are written there; None: no limit."""
    poll_s: float = 5.0
    """Between two looks for new checkpoints."""

    def __post_init__(self) -> None:
        for place in (self.origin, self.mirror):
            arguments.expanded(place)
            if not os.path.isabs(place) and "://" not in place:
                raise UsageError(f"mirror {self.origin}={self.mirror}: {place!r} must be an absolute path or a URL")
        if os.path.normpath(self.origin) == os.path.normpath(self.mirror):
            raise UsageError(f"{self.origin} cannot be its own mirror")
        if self.limit_bps is not None and not self.limit_bps > 0:
            raise UsageError(f"limit_bps is {self.limit_bps!r}; it must be greater than 0")
        arguments.seconds("poll_s", self.poll_s)
        _ = self.rules

    @property
    def rules(self) -> Retention:
        """Which checkpoints stay at the mirror."""
        return Retention(
            keep_last=self.keep_last,
            every_steps=self.every_steps,
            younger_than_s=self.younger_than_s,
            best=self.best,
            metric=self.metric,
            mode=self.mode,
        )


ExportDType = Literal["keep", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """A rule by which checkpoints are exported after their commits, as Hugging Face's libraries load them."""

    to: str
    """A directory, or the URL of a bucket. The export of each checkpoint is a directory there, named by its tag."""
    every_steps: int | None = None
    """Export checkpoints whose step is a multiple of this number; None: all."""
    keep_last: int | None = None
    """Keep this many of the newest exports; None: all."""
    only: str = "model"
    """The part of the state that is exported. Its name is not a part of the tensors' names."""
    dtype: ExportDType = "keep"
    """The dtype of floating-point tensors."""
    max_shard_size: int | str = "5GB"
    """The largest size of one file of weights: bytes, or a text such as "5GB"."""
    files: str | None = None
    """A directory whose files are copied beside the weights: configuration, tokenizer and so on, but no weights."""
    memory: int | str = "256MiB"
    """About how much memory an export uses."""
    limit_bps: float | None = None
    """The most bytes per second that are exported; None: no limit."""

    def __post_init__(self) -> None:
        arguments.path("to", self.to)
        if not self.only or type(self.only) is not str:
            raise UsageError(f"only is {self.only!r:.80}; it must name a part of the state, such as 'model'")
        for name in ("every_steps", "keep_last"):
            if (value := getattr(self, name)) is not None:
                arguments.whole(name, value)
        arguments.choice("dtype", self.dtype, get_args(ExportDType))
        byte_count(self.max_shard_size, "max_shard_size")
        if byte_count(self.memory, "memory") < EXPORT_BYTES_MIN:
            raise UsageError(f"memory is {self.memory!r}; an export needs at least {EXPORT_BYTES_MIN} bytes")
        if self.limit_bps is not None and not self.limit_bps > 0:
            raise UsageError(f"limit_bps is {self.limit_bps!r}; it must be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedExport(ExportConfig):
    """A root whose checkpoints the daemon exports. `root`, `to` and `files` are absolute paths; the first two may be URLs."""

    root: str
    poll_s: float = 5.0
    """Between two looks for new checkpoints."""

    def __post_init__(self) -> None:
        ExportConfig.__post_init__(self)
        for place in (self.root, self.to):
            arguments.expanded(place)
            if not os.path.isabs(place) and not is_bucket_url(place):
                raise UsageError(f"export {self.root}={self.to}: {place!r} must be an absolute path, or the URL of a bucket")
        if self.files is not None and not os.path.isabs(self.files):
            raise UsageError(f"export {self.root}={self.to}: files is {self.files!r}; it must be an absolute path")
        arguments.seconds("poll_s", self.poll_s)


def _half_of_memory() -> int:
    return memory_limit.memory_bytes() // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """A sidecar: where it listens, for whom, and its bounds. Sizes in bytes, times in seconds."""

    socket: str
    roots: tuple[str, ...]
    """Clients may have their roots at or below these directories."""
    uids: tuple[int, ...] = field(default_factory=lambda: (os.geteuid(),))
    """User ids that may connect. The daemon serves every user with that user's own rights."""
    status_uids: tuple[int, ...] = ()
    """Further user ids that may ask for the status only. `uids`, the daemon's own user and root may ask for it anyway."""
    group: str | None = None
    """A group whose members may open the socket, too; None: only the owner may."""
    clients_max: int = 256
    slots_max: int = 4
    """Slots per client: two in use, and two that are being replaced."""
    saves_max: int = 4
    """Saves per client that have not voted yet. Saves that only wait for other ranks cost next to nothing."""
    user_clients_max: int | None = None
    """Connections of one user; None: all of them, or half of them if several users may connect."""
    memory_bytes_max: int = field(default_factory=_half_of_memory)
    """The most memory that all clients together may make the daemon hold: slots (which are the trainers' memory), layouts,
    state trees and incoming messages. The daemon's own memory for writing, `budget_bytes` per save, is not counted."""
    user_bytes_max: int | None = None
    """The same for the clients of one user; None: all of it, or half of it if several users may connect."""
    held_bytes_max: int = field(default_factory=_half_of_memory)
    """The most bytes of snapshots retained for restarts; 0: none."""
    hold_s: float = 1800.0
    """How long a snapshot is retained after its trainer has gone."""
    budget_bytes: int | None = None
    """The most memory that one save may take beside its snapshot; None: as much as the client asks for."""
    encoders: int = field(default_factory=lambda: max(1, min(4, (os.cpu_count() or 2) - 1)))
    """Chunks of one save that are encoded at once, each on a thread."""
    bandwidth_bps: float | None = None
    """The most bytes per second that all clients' saves together may write; None: no limit."""
    niceness: int = 0
    io_class: Literal["none", "best-effort", "idle"] = "none"
    sandbox: Literal["auto", "require", "off"] = "auto"
    """Whether the daemon forbids itself to start programs and to use other files. "auto": as far as the kernel can and a root
    may still be mounted anew; "require": completely, or the daemon does not start."""
    http: str | None = None
    """The address for the status over HTTP: HOST:PORT, or the path of a Unix socket; None: no HTTP."""
    http_public: bool = False
    """Whether HOST in `http` may be reachable from other machines. Their users then see paths, tags and errors of every job."""
    metrics_per_rank: bool = False
    """Whether metrics have a label `rank`; otherwise the ranks of a root are counted together."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of roots for people, by the roots' paths: the status shows them, and metrics have them as the label `name`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """One line of text for each record, or one JSON object."""
    mirrors: tuple[ServedMirror, ...] = ()
    """Roots that the daemon mirrors to other places, with its own user's rights."""
    exports: tuple[ServedExport, ...] = ()
    """Roots whose checkpoints the daemon exports for other programs, with its own user's rights."""
    grace_s: float = 60.0
    """How long saves in flight may take after SIGTERM."""
    idle_s: float | None = None
    """The daemon leaves when it has had no trainer, no save and no snapshot for so long; None: never."""
    spool: str | None = None
    """A directory on this node's own disk, in which snapshots become durable before they are uploaded; None: no spool."""
    spool_bytes_max: int | None = None
    spool_keep: SpoolKeep = "all"
    spool_bandwidth_bps: float | None = None
    spool_timeout_s: float = 86_400.0
    spool_retain: bool = True
    spool_finish: bool = False
    """These are the fields of SpoolConfig, which describes them."""
    progress_interval_s: float = 0.2
    hello_s: float = 5.0
    """How long a new connection may take to identify itself."""

    def __post_init__(self) -> None:
        if not self.roots:
            raise UsageError("a sidecar needs at least one root that it may serve: give --root")
        for root in (*self.roots, *self.names):
            arguments.expanded(root)
            if not is_bucket_url(root) and not os.path.isabs(root):
                raise UsageError(f"root {root!r} must be an absolute path, or the URL of a bucket")
        if len(set(self.uids)) > 1 and (buckets := [root for root in self.roots if is_bucket_url(root)]):
            raise UsageError(
                f"this sidecar may serve {buckets[0]} to one user only, and {len(set(self.uids))} are named: it writes there "
                "with its own credentials, which do not tell users apart. Run a sidecar for each user"
            )
        # Only if there are names: a file system that hangs must not keep the daemon from starting.
        served = [_resolved(root) for root in self.roots] if self.names else []
        for root in self.names:
            real = _resolved(root)
            if not any(real == one or real.startswith(one.rstrip("/") + "/") for one in served):
                raise UsageError(
                    f"the name {self.names[root]!r} is for {root}, which lies below no --root ({', '.join(self.roots)})"
                )
        targets = [one.mirror for one in self.mirrors]
        if twice := next((target for target in targets if targets.count(target) > 1), None):
            raise UsageError(f"two roots are to be mirrored to {twice}: give each a mirror of its own")
        targets = [one.to for one in self.exports]
        if twice := next((target for target in targets if targets.count(target) > 1), None):
            raise UsageError(f"two rules export to {twice}: give each a place of its own")
        nbytes = len(os.fsencode(arguments.expanded(self.socket)))
        if nbytes > SOCKET_PATH_BYTES_MAX:
            raise UsageError(f"the socket's path has {nbytes} bytes; Linux takes up to {SOCKET_PATH_BYTES_MAX}: {self.socket}")
        _positive(clients_max=self.clients_max, slots_max=self.slots_max, saves_max=self.saves_max, encoders=self.encoders)
        _positive(progress_interval_s=self.progress_interval_s, hello_s=self.hello_s)
        if self.bandwidth_bps is not None and self.bandwidth_bps < MIB:
            raise UsageError(f"bandwidth_bps is {self.bandwidth_bps:g}; choose 1 MiB/s or more")
        if not -20 <= self.niceness <= 19:
            raise UsageError(f"niceness is {self.niceness}; choose -20 to 19")
        for name in ("user_clients_max", "user_bytes_max", "memory_bytes_max", "held_bytes_max", "hold_s", "grace_s", "idle_s"):
            if (getattr(self, name) or 0) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it cannot be negative")
        if self.spool is not None and not os.path.isabs(self.spool):
            raise UsageError(f"spool {self.spool!r} must be an absolute path")
        if self.spool is None:
            for one in fields(self):
                if one.name.startswith("spool_") and getattr(self, one.name) != one.default:
                    raise UsageError(
                        f"{one.name} is set, but there is no spool: give --spool, a directory on this node's own disk"
                    )
        self.spool_config  # noqa: B018  # raises for bad settings

    @property
    def spool_config(self) -> SpoolConfig | None:
        """The settings of the spool; None without one."""
        if self.spool is None:
            return None
        return SpoolConfig(
            directory=self.spool,
            bytes_max=self.spool_bytes_max,
            keep=self.spool_keep,
            bandwidth_bps=self.spool_bandwidth_bps,
            timeout_s=self.spool_timeout_s,
            retain=self.spool_retain,
            finish=self.spool_finish,
        )

    @property
    def user_clients(self) -> int:
        """Connections that one user may have."""
        return share(self.clients_max, self.user_clients_max, self.uids)

    @property
    def user_bytes(self) -> int:
        """Bytes that the clients of one user may make the daemon hold."""
        return share(self.memory_bytes_max, self.user_bytes_max, self.uids)


def _resolved(root: str) -> str:
    """`root` without links, or its URL without options."""
    return parse(root).place if is_bucket_url(root) else os.path.realpath(root)


def share(of_all: int, given: int | None, uids: tuple[int, ...]) -> int:
    """The part of `of_all` for one user: at most `given`. By default all of it, or half of it if there are several `uids`."""
    return min(of_all, given) if given is not None else of_all if len(uids) < 2 else -(-of_all // 2)
