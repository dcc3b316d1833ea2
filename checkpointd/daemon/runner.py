"""The daemon as a process: signals, systemd's readiness and watchdog, and the parts that run beside the socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from importlib import import_module

import uvloop

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.commands import install
from checkpointd.config import ServeConfig, Watched, environment_watched
from checkpointd.daemon import sandbox
from checkpointd.daemon.process import priority
from checkpointd.daemon.protocol.listener import make_directory
from checkpointd.daemon.roots.root_monitor import RootMonitor
from checkpointd.daemon.served_roots import ServedRoots, on_a_thread
from checkpointd.daemon.service import Service
from checkpointd.daemon.spool.places import DiskPlace
from checkpointd.daemon.users import check_users
from checkpointd.errors import SidecarError, StoreError, UsageError
from checkpointd.store.opening import import_client
from checkpointd.system_errors import in_words

log = logging.getLogger("checkpointd")

LOOK_S = 1.0
"""How often the daemon checks that the sandbox's rules still hold."""
OVERDUE_S = 25.0
"""How much longer than the grace for saves a daemon that leaves may take, before it exits without waiting for the storage. The
shipped units and manifests kill it 30 seconds after the grace."""
OVERDUE_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: what manages the daemon may start it again."""


def serve(config: ServeConfig, *, on_ready: Callable[[str | None], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT. Calls `on_ready` with the URL of the status page, or None without HTTP."""
    check_users(config.uids)
    priority.apply(config)  # before other threads start
    for directory in sandbox.socket_directories(config):
        make_directory(directory, config.group)
    if config.spool is not None:
        DiskPlace(config.spool)  # makes it: the sandbox has a rule for it
    _import_what_is_needed_later(config)
    rules = sandbox.apply(config)
    overdue = threading.Timer(config.grace_s + OVERDUE_S, _exit, [config.grace_s + OVERDUE_S])
    overdue.daemon = True
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, rules, on_ready, overdue))
    finally:
        overdue.cancel()


def _exit(seconds: float) -> None:
    """End the process at once. A system call that hangs cannot be stopped, and an orderly end would wait for it."""
    log.critical("this daemon was told to leave %g s ago, and the storage has not answered since: it exits without it", seconds)
    logging.shutdown()
    os._exit(OVERDUE_STATUS)


def _import_what_is_needed_later(config: ServeConfig) -> None:
    """Import before the sandbox starts: some installers make modules links to places that the sandbox forbids."""
    if config.http:
        try:
            import_module("checkpointd.daemon.http.server")  # aiohttp is in the extra `serve`, and takes a while to import
        except ImportError as error:
            raise UsageError(f"HTTP needs {error.name}: {install('serve')}; or start without --http") from error
    mirrored = (place for one in config.mirrors for place in (one.origin, one.mirror))
    exported = (place for one in config.exports for place in (one.root, one.to))
    if bucket := next(filter(is_bucket_url, (*config.roots, *mirrored, *exported)), None):
        import_client(parse(bucket))


async def _serve(
    config: ServeConfig, rules: Sequence[sandbox.Rule], on_ready: Callable[[str | None], None], overdue: threading.Timer
) -> None:
    await _check_roots(config.roots)
    loop = asyncio.get_running_loop()
    service, supervisor = Service(config), Supervisor(environment_watched())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.leave)
    running = asyncio.create_task(service.run())
    ready = asyncio.create_task(service.ready())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    lost: list[str] = []
    async with contextlib.AsyncExitStack() as beside:
        if not running.done():
            url = await beside.enter_async_context(_http(service)) if config.http else None
            monitor = RootMonitor(service.hub)
            service.hub.on_news = monitor.look_soon
            service.hub.on_remade = monitor.remade
            service.beside(monitor.run())
            if config.mirrors:
                service.beside(service.hub.mirrors.run())
            if config.exports:
                service.beside(service.hub.exports.run())
            if config.idle_s is not None:
                service.beside(service.leave_when_idle(config.idle_s))
            for rule in rules:
                service.beside(_watch(rule, service, lost))
            beside.push_async_callback(_ended, asyncio.create_task(supervisor.watch()))
            supervisor.tell(f"READY=1\nSTATUS=listening at {config.socket}")
            on_ready(url)
            beside.push_async_callback(_ended, asyncio.create_task(_say_stopping(service, supervisor, overdue)))
        await running
    ready.cancel()
    if lost:
        raise SidecarError(lost[0])


async def _watch(rule: sandbox.Rule, service: Service, lost: list[str]) -> None:
    """Leave when `rule` no longer holds. Every save there would fail, and a restarted daemon gets a new rule."""
    while not await on_a_thread(rule.lost):
        await asyncio.sleep(LOOK_S)
    lost.append(f"{rule.directory}: the sandbox's rule is for a directory that is gone ({rule.ruled}): restart the daemon")
    log.error("%s; this one leaves", lost[-1])
    service.leave()


async def _check_roots(roots: Sequence[str]) -> None:
    """Refuse roots at which no job could save. A file system that does not answer now may do so when a trainer comes."""
    try:
        await ServedRoots(roots).usable()
    except StoreError as error:
        log.warning("the roots %s could not be checked: %s", ", ".join(roots), error)


def _http(service: Service) -> contextlib.AbstractAsyncContextManager[str]:
    from checkpointd.daemon.http.server import serving

    assert service.config.http is not None
    return serving(service.hub, service.config.http)


async def _say_stopping(service: Service, supervisor: Supervisor, overdue: threading.Timer) -> None:
    await service.leaving()
    overdue.start()
    supervisor.tell("STOPPING=1\nSTATUS=finishing the saves in flight")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Supervisor:
    """Tells systemd, if it started the daemon, that the daemon is ready and that its loop runs (sd_notify(3))."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def tell(self, state: str) -> None:
        """Send `state`, unless there is nobody to tell."""
        address = self._watched.notify_socket
        if address is None:
            return
        name = "\0" + address[1:] if address.startswith("@") else address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.sendto(state.encode(), name)
        except OSError as error:
            log.warning("systemd cannot be told at %s: %s", address, in_words(error, "file"))

    async def watch(self) -> None:
        """Feed the watchdog from the loop that does the work, so that systemd notices if the loop hangs."""
        period_s = self._watched.watchdog_s
        if period_s is None or self._watched.watchdog_pid not in (None, os.getpid()):
            return
        while True:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(period_s / 2)
