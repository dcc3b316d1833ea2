// One root: its summary, and the parts that unfold.

import { h } from "./dom.js";
import { attempts, liveAttempts, progress } from "./attempts.js";
import { badge, folded, name, number, table, tile, unknown } from "./elements.js";
import { inFlight } from "./flight.js";
import { history } from "./history.js";
import { spent } from "./spent.js";
import { layout, legend, picture, rows, titles } from "./timeline.js";
import { about, ago, clock, count, duration, median, percent, ranks as rankWords, size } from "./formatting.js";

const ERRORS_MAX = 12, RANKS_MAX = 32, OPEN_MAX = 3;
const SIGNS = { bad: "✕", doubt: "!", good: "✓", quiet: "–" };
const NO_SAVE = "no save has ended here yet";

/** Whether a root is unfolded at first: the first few that need a look, save, or have trainers. */
export function opensByItself(root, roots) {
  const lively = roots.filter((one) => one.verdict.mood !== "quiet" || one.in_flight.length);
  return lively.slice(0, OPEN_MAX).includes(root);
}

export function rootCard(root, isOpen, now, ui) {
  const shown = ui.lost ? { ...root, verdict: notKnown(now) } : root;
  return h(
    "details",
    { class: `card root is-${shown.verdict.mood}`, "data-key": root.root, "data-root": root.root },
    summary(shown, now),
    isOpen && h("div", { class: "inside" }, inside(root, now, ui)),
  );
}

/** The verdict while the daemon does not answer, since `now`. */
const notKnown = (now) => ({ state: "not known", mood: "doubt", reason: `The daemon does not answer. It last said something of this root at ${clock(now)}` });

export const verdict = (root) => h("span", { class: `badge verdict ${root.verdict.mood}` }, h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[root.verdict.mood]), ` ${root.verdict.state}`);

function summary(root, now) {
  return h(
    "summary",
    null,
    h("h2", { class: "path" }, name(root.name || root.root), root.name && h("small", null, " ", name(root.root))),
    h("span", { class: "badges" }, verdict(root), saving(root, now)),
    h("span", { class: "brief" }, brief(root, now)),
    h("span", { class: "reason" }, name(`${root.verdict.reason}.`)),
  );
}

function saving(root, now) {
  const flying = liveAttempts(root, now);
  if (!flying.length) return null;
  const all = flying.map(progress), least = Math.min(...all.filter((one) => !one.goesUp).map((one) => one.fraction), 1);
  const upload = all.filter((one) => one.goesUp);
  if (all.every((one) => one.hasVoted)) return badge("saved here, waiting for votes", "busy");
  if (all.length > upload.length) return badge(`saving, ${percent(least)}`, "busy");
  const sum = (key) => upload.reduce((before, one) => before + one[key], 0);
  return badge(`in the spool, ${percent(sum("done") / Math.max(1, sum("total")))} uploaded`, "busy");
}

function brief(root, now) {
  if (root.newest_committed_at === null) return "no checkpoint is known";
  const latest = root.latest === null ? "no latest" : name(root.latest);
  return [h("span", { class: "tag" }, latest, ", "), ago(now - root.newest_committed_at)];
}

function inside(root, now, ui) {
  const wrong = errors(root, now);
  const urgent = root.verdict.mood === "bad" || root.verdict.mood === "doubt";
  return [
    root.problem && problem(root),
    urgent && wrong,
    inFlight(root, now, ui),
    tiles(root, now),
    !urgent && wrong,
    timeline(root, now, ui),
    spent(root, now),
    history(root, ui),
    h("div", { class: "columns" }, checkpoints(root, now), ranksOf(root, ui)),
  ];
}

function problem(root) {
  return h(
    "div",
    { class: "note bad", role: "alert" },
    root.problem_advice && h("p", { class: "advice" }, name(root.problem_advice), " ", h("code", { class: "code" }, root.problem.code)),
    root.newest_committed_at !== null && h("p", null, "Below is what was seen before."),
  );
}

// --- numbers -----------------------------------------------------------------------------------------------------

function tiles(root, now) {
  return h("dl", { class: "tiles" }, latest(root), newest(root, now), due(root, now), took(root), held(root), space(root), here(root));
}

function latest(root) {
  if (root.latest === null) return tile("Latest", "none", root.problem ? "not read" : null);
  return tile("Latest", name(root.latest), root.newest_step === null ? null : `newest step ${root.newest_step.toLocaleString("en")}`);
}

function newest(root, now) {
  if (root.newest_committed_at === null) return tile("Newest commit", null, root.problem ? "the root was not read" : "no commit was seen");
  return tile("Newest commit", ago(now - root.newest_committed_at), clock(root.newest_committed_at));
}

function due(root, now) {
  if (root.next_due_at === null) {
    return tile("Next save", null, root.ranks.some((rank) => rank.connected) ? "fewer than three saves were seen" : "no trainer is connected");
  }
  const left = root.next_due_at - now, every = `one came every ${about(root.every_s)}`;
  if (root.verdict.state === "late") return tile("Next save", `${about(-left)} late`, every, "doubt");
  return tile("Next save", left >= 1 ? `in ${about(left)}` : left > -10 ? "due now" : `due ${about(-left)} ago`, every);
}

function took(root) {
  const known = root.commit_s.length ? root.commit_s : root.history.map((past) => past.took_s).filter((seconds) => seconds !== null);
  if (!known.length) return tile("Save to commit", null, root.ranks.some((rank) => rank.rank === 0) ? NO_SAVE : "rank 0 is on another node");
  return tile("Save to commit", duration(median(known)), `median of the last ${known.length}`);
}

function held(root) {
  const each = root.ranks.map((rank) => [rank.stall_s, rank.saves_committed + rank.saves_failed]).filter(([, saves]) => saves);
  if (!each.length) return tile("Training held", null, NO_SAVE);
  return tile("Training held", duration(Math.max(...each.map(([seconds, saves]) => seconds / saves))), "per save, slowest rank");
}

function space(root) {
  const room = root.space;
  if (room === null) return tile("Space left", null, "the file system was not asked yet");
  const free = `${size(room.free_bytes)} free of ${size(room.total_bytes)}`;
  if (room.growth_bytes_per_day === null) return tile("Space left", size(room.free_bytes), `of ${size(room.total_bytes)}; in days after an hour`);
  if (room.days_left === null || room.days_left > 3650) return tile("Space left", size(room.free_bytes), `of ${size(room.total_bytes)}; it does not fill up`);
  const days = room.days_left < 2 ? about(room.days_left * 86400) : `${Math.floor(room.days_left)} days`;
  const mood = room.days_left < 1 ? "bad" : room.days_left < 7 ? "doubt" : null;
  return tile("Space left", days, `${free}; ${size(Math.round(room.growth_bytes_per_day))} more a day`, mood);
}

function here(root) {
  if (!root.ranks.length) return tile("Ranks here", "none", "since the daemon began");
  const connected = root.ranks.filter((rank) => rank.connected).length;
  const world = Math.max(...root.ranks.map((rank) => rank.world_size));
  return tile("Ranks here", `${connected} of ${root.ranks.length}`, `connected; ${count(world, "rank")} in the job`);
}

// --- what went wrong ---------------------------------------------------------------------------------------------

function errors(root, now) {
  const wrong = attempts(root.recent.filter((save) => save.error !== null), now).reverse();
  if (!wrong.length) return null;
  const more = wrong.length - ERRORS_MAX;
  return h(
    "section",
    { class: "part", "data-key": "errors", "aria-label": "Saves that failed" },
    h("h3", null, `${wrong.length} of the last saves did not commit`),
    wrong.slice(0, ERRORS_MAX).map((attempt) => failure(attempt, now)),
    more > 0 && h("p", { class: "quiet" }, `${more} older ones are in the log.`),
  );
}

/** Each error with its advice; equal advice is shown once. */
function failure(attempt, now) {
  const causes = new Map();
  for (const save of attempt.saves) {
    const key = JSON.stringify([save.phase, save.error.code, save.error.message, save.advice]);
    causes.set(key, [...(causes.get(key) ?? []), save]);
  }
  const ordered = [...causes.values()].sort((a, b) => order(a[0].phase) - order(b[0].phase));
  const last = new Map(ordered.map((saves, at) => [saves[0].advice, at]));
  return h(
    "article",
    { class: "failure", "data-key": attempt.key },
    h("h4", null, name(attempt.tag), " ", h("small", null, `attempt ${attempt.attempt} · ${clock(attempt.ended)}, ${ago(now - attempt.ended)}`)),
    ordered.map((saves, at) => [
      h("p", null, h("strong", null, `${rankWords(saves.map((save) => save.rank))} ${saves[0].phase}`), ": ", name(saves[0].error.message), " ", h("code", { class: "code" }, saves[0].error.code)),
      saves[0].advice && last.get(saves[0].advice) === at && h("p", { class: "advice" }, name(saves[0].advice)),
    ]),
  );
}

/** Saves that failed themselves come before saves that were aborted because of them. */
const order = (phase) => ["fenced", "failed", "skipped", "aborted"].indexOf(phase);

// --- the picture -------------------------------------------------------------------------------------------------

function timeline(root, now, ui) {
  const drawn = layout(root, now, ui.width, ui.sameScale);
  ui.drawn.set(root.root, drawn);
  if (drawn === null) return null;
  return h(
    "section",
    { class: "part", "aria-label": "Timeline of the last saves" },
    h("h3", null, "The last saves, rank by rank"),
    h("div", { class: "over" }, legend(drawn, now), h("label", null, h("input", { type: "checkbox", "data-action": "scale", checked: ui.sameScale }), " one time scale for all")),
    h("div", { class: "picture" }, picture(drawn, now, root.root)),
    folded(ui, `table ${root.root}`, "The same as a table", () => table("Timeline as a table", titles(drawn, now), rows(drawn, now))),
  );
}

// --- what is there -----------------------------------------------------------------------------------------------

function checkpoints(root, now) {
  const isHeld = (c) => root.held.some((one) => one.tag === c.tag && one.attempt === c.attempt);
  const found = root.checkpoints.map((c) => ({
    mark: c.is_latest ? "latest" : null,
    cells: [
      [name(c.tag), c.is_latest && [" ", badge("latest", "good")], isHeld(c) && [" ", badge("in memory", "quiet")], c.read_back === "damaged" && [" ", badge("damaged", "bad")]],
      number(c.step.toLocaleString("en")),
      number(when(c.committed_at, now)),
      number(c.world_size.toLocaleString("en")),
      READ_BACK[c.read_back],
    ],
  }));
  return h(
    "section",
    { class: "part", "aria-label": "Checkpoints" },
    h("h3", null, found.length ? "Checkpoints, newest first" : "No checkpoint is known yet"),
    found.length > 0 && table("Checkpoints", ["Tag", "Step", "Committed", "Ranks", "Read back"], found),
  );
}

const READ_BACK = { no: "not yet", whole: "whole", damaged: "damaged" };

function when(time, now) {
  if (time === null) return name("unknown");
  const text = new Date(time * 1000).toISOString();
  return h("time", { datetime: text, title: text }, ago(now - time));
}

function ranksOf(root, ui) {
  if (!root.ranks.length) return null;
  const named = (ranks) => rankWords(ranks.map((rank) => rank.rank));
  const gone = root.ranks.filter((rank) => !rank.connected && !rank.left_well), closed = root.ranks.filter((rank) => rank.left_well);
  const told = [gone.length && `No trainer is connected for ${named(gone)}.`, closed.length && `The trainer of ${named(closed)} has closed it.`].filter(Boolean);
  const note = told.length ? told.join(" ") : "All trainers of this node are connected.";
  const all = () => table("Ranks", ["Rank", "Process", "Start", "Committed", "Failed", "Persisted", "Stored", "Held up"], root.ranks.map(rankRow));
  return h(
    "section",
    { class: "part", "aria-label": "Ranks" },
    h("h3", null, "Ranks of this node"),
    h("p", { class: "facts" }, `${note} Numbers count since the daemon began.`),
    inline(root),
    root.ranks.length > RANKS_MAX ? folded(ui, `ranks ${root.root}`, `All ${root.ranks.length} ranks`, all) : all(),
  );
}

/** How many saves were inline. */
function inline(root) {
  const saves = root.ranks.reduce((sum, rank) => sum + rank.saves_inline, 0);
  const last = root.recent.findLast((save) => save.inline);
  return saves > 0 && h("p", { class: "facts" }, `The trainers persisted ${count(saves, "save")} themselves`, last && ["; the last one: ", name(last.inline.why)], ".");
}

function rankRow(rank) {
  const state = rank.connected ? String(rank.pid) : rank.left_well ? badge("closed", "quiet") : badge("gone", "doubt");
  const saves = rank.saves_committed + rank.saves_failed;
  return {
    cells: [
      number(String(rank.rank)),
      state,
      number(rank.start === null ? unknown("it has not started yet") : String(rank.start)),
      number(rank.saves_committed.toLocaleString("en")),
      number(h("span", { class: rank.saves_failed ? "bad" : null }, rank.saves_failed.toLocaleString("en"))),
      number(saves ? size(rank.bytes_persisted) : unknown(NO_SAVE)),
      number(saves ? size(rank.bytes_stored) : unknown(NO_SAVE)),
      number(saves ? duration(rank.stall_s) : unknown(NO_SAVE)),
    ],
  };
}
