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

const DONE = ["spooled", "uploading", "prepared", "committed"];

/** How much of a rank's bytes is durable, at the root or in the spool, from 0 to 1. */
export function fraction(save) {
  if (DONE.includes(save.phase)) return 1;
  return save.raw_total ? Math.min(0.99, save.raw_done / save.raw_total) : 0; // as part_done of checkpointd/pipeline/shard.py
}

/** How far an attempt has come, over its ranks here. */
export function progress(attempt) {
  const { saves } = attempt;
  const busy = saves.filter((save) => save.phase === "persisting");
  const etas = busy.map((save) => save.eta_s).filter((eta) => eta !== null);
  const coordinator = saves.find((save) => save.votes_missing !== null);
  return {
    fraction: saves.reduce((sum, save) => sum + fraction(save), 0) / saves.length,
    total: saves.reduce((sum, save) => sum + save.raw_total, 0),
    done: saves.reduce((sum, save) => sum + save.raw_done, 0),
    speed: busy.reduce((sum, save) => sum + (save.speed_bps ?? 0), 0),
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
  return found;
}
