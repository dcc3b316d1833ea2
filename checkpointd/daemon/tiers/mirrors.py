"""The mirrors that a daemon keeps: each follows its origin in a task of its own (FOLLOWER-1)."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from checkpointd.config import ServedMirror
from checkpointd.daemon.tiers.followers import Followers, opened
from checkpointd.mirror.following import Follower, FollowPace
from checkpointd.mirror.mirroring import MirrorConfig
from checkpointd.mirror.news import WORDS, MirrorProgress, News, RemovalNews

log = logging.getLogger("checkpointd")


class Mirrors(Followers[ServedMirror, MirrorProgress]):
    """All mirrors of one daemon."""

    noun, doing, done = "a mirror", "mirroring", "mirrored"

    def _beginning(self, setting: ServedMirror) -> MirrorProgress:
        return MirrorProgress(origin=setting.origin, mirror=setting.mirror)

    def _places(self, setting: ServedMirror) -> tuple[str, str]:
        return setting.origin, setting.mirror

    def _follower(self, setting: ServedMirror, stores: AsyncExitStack) -> Follower:
        origin, mirror = opened(setting.origin, stores, read_only=True), opened(setting.mirror, stores)
        config = MirrorConfig(
            rules=setting.rules, everything=setting.everything, verify=setting.verify, limit_bps=setting.limit_bps
        )
        return Follower(origin, mirror, config, FollowPace(poll_s=setting.poll_s), is_patient=True, tell=_log)


def _log(news: News) -> None:
    if isinstance(news, RemovalNews):
        log.info("the rules of the mirror removed %s there", ", ".join(news.retired))
    elif news.kind in ("mirrored", "healed"):
        words = "%s %s: %d bytes copied, %d were there"
        log.info(words, news.tag, WORDS[news.kind], news.copied_bytes, news.found_bytes)
    else:
        level = logging.INFO if news.kind in ("left-out", "removed") else logging.ERROR
        log.log(level, "%s %s: %s", news.tag, WORDS[news.kind], news.why)
