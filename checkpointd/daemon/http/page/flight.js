// Saves in flight: how far each has come, rank by rank.

import { h, s } from "./dom.js";
import { foremost, fraction, isInSpool, liveAttempts, progress } from "./attempts.js";
import { folded, name, number, table } from "./elements.js";
import { count, duration, percent, printable, ranks as rankWords, size, sizeOf, speed } from "./formatting.js";

const BARS_MAX = 8, SLOWEST = 3, FLIGHTS_MAX = 4;

export function inFlight(root, now, ui) {
  const flying = liveAttempts(root, now), isHere = root.ranks.some((rank) => rank.rank === 0);
  const [shown, others] = foremost(flying, FLIGHTS_MAX);
  return h(
    "section",
    { class: "part", "aria-label": "Saves in flight" },
    h("h3", null, flying.length ? "In flight" : "Nothing is in flight"),
    shown.map((attempt) => flight(attempt, now, ui, isHere)),
    others.length > 0 && folded(ui, `flights ${root.root}`, `${count(others.length, "more save")} in flight, the oldest for ${duration(now - others[0].began)}`, () => rest(others, now)),
  );
}

/** The saves in flight that have no bars, the newest first. */
function rest(others, now) {
  const rows = [...others].reverse().map((attempt) => ({
    cells: [name(attempt.tag), attempt.attempt, number(attempt.step.toLocaleString("en")), number(duration(now - attempt.began)), facts(attempt, progress(attempt)).join(" · ")],
  }));
  return table("More saves in flight", ["Tag", "Attempt", "Step", "For", "State"], rows);
}

const SHOWN = [["staging", "staging"], ["staged", "staged"], ["persisting", "persisting"], ["spooled", "spooled"], ["uploading", "uploading"], ["prepared", "voted"], ["failed", "failed"], ["fenced", "fenced"], ["superseded", "superseded"], ["skipped", "skipped"]];

/** `isHere`: whether rank 0, which counts the votes, is on this node. */
function flight(attempt, now, ui, isHere) {
  const p = progress(attempt);
  const label = `${printable(attempt.tag)}: ${p.goesUp ? "uploaded" : "persisted"}`;
  return h(
    "article",
    { class: "flight", "data-key": attempt.key },
    h("h4", null, name(attempt.tag), " ", h("small", null, `attempt ${attempt.attempt} · step ${attempt.step.toLocaleString("en")} · for ${duration(now - attempt.began)}`)),
    h("div", { class: p.goesUp ? "bar uploading" : "bar" }, h("progress", { max: 1, value: p.fraction.toFixed(4), "aria-label": label }), h("output", null, percent(p.fraction), p.goesUp && " uploaded")),
    h("p", { class: "facts" }, facts(attempt, p).join(" · ")),
    attempt.absent.length > 0 && h("p", { class: "facts" }, `${rankWords(attempt.absent)} ${attempt.absent.length === 1 ? "has" : "have"} not called save() yet.`),
    h("p", { class: "facts" }, waiting(p.missing, isHere)),
    attempt.saves.length <= BARS_MAX ? rankBars(attempt) : strip(attempt, ui.width - 48),
  );
}

function facts(attempt, p) {
  const phases = SHOWN.map(([phase, word]) => [attempt.saves.filter((save) => save.phase === phase).length, word]);
  const told = phases.filter(([n]) => n).map(([n, word]) => `${n} ${word}`);
  if (p.total) told.push(`${sizeOf(p.done, p.total)}${p.goesUp ? " uploaded" : ""}`);
  if (p.speed) told.push(speed(p.speed));
  if (p.eta !== null) told.push(`about ${duration(p.eta)} left`);
  return told;
}

function waiting(missing, isHere) {
  if (missing === null) return isHere ? "Votes are counted once rank 0 has called save()." : "Votes are counted on the node of rank 0.";
  return missing.length ? `Waiting for the vote${missing.length === 1 ? "" : "s"} of ${rankWords(missing)}.` : "All votes are in.";
}

function rankBars(attempt) {
  return h(
    "ul",
    { class: "bars" },
    attempt.saves.map((save) =>
      h(
        "li",
        { class: save.phase },
        h("span", { class: "who" }, `rank ${save.rank}`),
        h("progress", { max: 1, value: fraction(save).toFixed(4), "aria-label": `rank ${save.rank}` }),
        h("span", { class: "what" }, rankWord(save)),
      ),
    ),
  );
}

function rankWord(save) {
  if (save.error) return `${save.phase}: ${printable(save.error.message)}`;
  if (save.phase === "uploading") return `uploading, ${sizeOf(save.uploaded, save.upload_total)}`;
  if (save.phase === "spooled") return `spooled, ${size(save.upload_total)} to upload`;
  if (save.phase !== "persisting") return save.phase === "prepared" ? "voted" : save.phase;
  const left = save.eta_s === null ? "" : `, ${duration(save.eta_s)} left`;
  return `${percent(fraction(save))}${save.speed_bps ? `, ${speed(save.speed_bps)}` : ""}${left}`;
}

/** For many ranks: a column for each rank, as high as its progress. */
function strip(attempt, width) {
  const n = attempt.saves.length, tall = 48;
  const wide = Math.max(1, Math.min(16, Math.floor(width / n))), gap = wide > 4 ? 1 : 0;
  const column = (save, at, part) => `M${at * wide} ${tall}v${(-tall * part).toFixed(1)}h${wide - gap}V${tall}z`;
  const kind = (save) => (save.phase === "prepared" ? "voted" : isInSpool(save) ? "uploading" : "persisting");
  const parts = (wanted, part) => attempt.saves.map((save, at) => (kind(save) === wanted ? column(save, at, part(save)) : "")).join("");
  const inSpool = parts("uploading", () => 1);
  const slow = attempt.saves.filter((save) => save.phase !== "prepared").sort((a, b) => fraction(a) - fraction(b)).slice(0, SLOWEST);
  const words = slow.map((save) => `rank ${save.rank} (${save.phase === "persisting" ? percent(fraction(save)) : save.phase})`).join(", ");
  return h(
    "div",
    { class: "strip" },
    s(
      "svg",
      { role: "img", "aria-label": `Progress of ${n} ranks`, width: n * wide, height: tall, "data-strip": attempt.key },
      s("rect", { class: "track", width: n * wide, height: tall }),
      s("path", { class: "seg persisting", d: parts("persisting", fraction) }),
      inSpool && s("path", { class: "seg spooled", d: inSpool }),
      inSpool && s("path", { class: "seg uploading", d: parts("uploading", fraction) }),
      s("path", { class: "seg voted", d: parts("voted", fraction) }),
    ),
    h("p", { class: "facts" }, `A column for each of ranks ${attempt.saves[0].rank} to ${attempt.saves.at(-1).rank}`, words && `; furthest behind: ${words}`, "."),
  );
}
