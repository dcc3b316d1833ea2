// Groups the saves of single ranks by attempt.

export const isFinal = (save) => ["committed", "aborted", "fenced", "superseded", "failed", "skipped"].includes(save.phase) && save.ended_at !== null;

/** Saves by attempt, in the order in which the attempts began: {key, tag, attempt, step, saves, began, ended}. */
export function attempts(saves, now) {
  const found = new Map();
  for (const save of saves) {
    const key = `${save.tag}/${save.attempt}`;
    const known = found.get(key);
    if (known) known.saves.push(save);
    else found.set(key, { key, tag: save.tag, attempt: save.attempt, step: save.step, saves: [save] });
  }
  for (const attempt of found.values()) {
    attempt.saves.sort((a, b) => a.rank - b.rank);
    attempt.began = Math.min(...attempt.saves.map((save) => save.began_at));
    attempt.ended = Math.max(...attempt.saves.map((save) => save.ended_at ?? now));
    attempt.live = attempt.saves.some((save) => save.ended_at === null);
  }
  return [...found.values()].sort((a, b) => a.began - b.began);
}

const DONE = ["spooled", "uploading", "prepared", "committed"], BEFORE = ["staging", "staged", "persisting"];

/** Whether a rank's bytes are durable in the spool, and go to the root. */
export const isInSpool = (save) => save.phase === "spooled" || save.phase === "uploading";

const NEARLY_DONE = 0.99;
const partDone = (done, total) => (total ? Math.min(NEARLY_DONE, done / total) : 0); // as part_done of checkpointd/pipeline/shard.py
const persisted = (save) => (DONE.includes(save.phase) ? 1 : partDone(save.raw_done, save.raw_total));

/** How much of a rank's bytes is on the disk, or, if they are in the spool, at the root; from 0 to 1. */
export const fraction = (save) => (isInSpool(save) ? partDone(save.uploaded, save.upload_total) : persisted(save));

const sum = (saves, value) => saves.reduce((before, save) => before + value(save), 0);

/** The `most` attempts to show first, and the others: what only waits in the spool comes last, and older ones after newer ones.
 * Both parts are in the order of `attempts`.
 */
export function foremost(found, most) {
  const waits = (attempt) => attempt.saves.every((save) => save.phase === "spooled");
  const first = new Set([...found.filter(waits), ...found.filter((attempt) => !waits(attempt))].slice(-most));
  return [found.filter((attempt) => first.has(attempt)), found.filter((attempt) => !first.has(attempt))];
}

/** The attempts at a root that have not ended on every rank here, each with its `absent` ranks: those of this node that have
 * not called save() for it.
 */
export function liveAttempts(root, now) {
  const found = attempts([...root.recent, ...root.in_flight], now).filter((attempt) => attempt.live);
  for (const attempt of found) {
    const begun = root.ranks.filter((rank) => rank.connected && rank.start === parseInt(attempt.attempt, 10));
    attempt.absent = begun.map((rank) => rank.rank).filter((rank) => !attempt.saves.some((save) => save.rank === rank));
  }
  return found;
}

/** How far an attempt has come, over its ranks here: in persisting, or in the upload from the spool once all have persisted. */
export function progress(attempt) {
  const { saves } = attempt;
  const busy = saves.filter((save) => save.phase === "persisting");
  const etas = busy.map((save) => save.eta_s).filter((eta) => eta !== null);
  const coordinator = saves.find((save) => save.votes_missing !== null);
  const goesUp = saves.some(isInSpool) && !saves.some((save) => BEFORE.includes(save.phase));
  const done = sum(saves, goesUp ? fraction : persisted) / (saves.length + attempt.absent.length);
  return {
    goesUp,
    hasVoted: !attempt.absent.length && saves.every((save) => save.phase === "prepared" || save.phase === "committed"),
    fraction: coordinator?.votes_missing.length === 0 ? done : Math.min(done, NEARLY_DONE),
    total: sum(saves, (save) => (goesUp ? save.upload_total : save.raw_total)),
    done: sum(saves, (save) => (goesUp ? save.uploaded : save.raw_done)),
    speed: sum(busy, (save) => save.speed_bps ?? 0),
    eta: etas.length ? Math.max(...etas) : null,
    missing: coordinator ? coordinator.votes_missing : null,
  };
}

/** The pieces of a save for the picture: [kind, from, to], in seconds since 1970. */
export function pieces(save, now) {
  const end = save.ended_at ?? now;
  const times = [save.began_at, save.staged_at, save.persisting_at, save.spooled_at, save.uploading_at, save.voted_at];
  const kinds = ["staging", "waiting", "persisting", "spooled", "uploading", "voted"];
  const known = times.map((time, at) => [kinds[at], time]).filter(([, time]) => time != null);
  const found = known.map(([kind, from], at) => [kind, from, Math.max(from, known[at + 1]?.[1] ?? end)]);
  if (save.ended_at !== null && save.phase !== "committed") found.at(-1)[0] = "lost";
  else if (save.staged_at == null && save.phase !== "staging") found[0][0] = "unmeasured";
  return found;
}
