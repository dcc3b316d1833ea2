// The page from a status: pure functions from data to elements.

import { h, s } from "./dom.js";
import { attempts, fraction, progress } from "./attempts.js";
import { layout, legend, picture, table } from "./timeline.js";
import { ago, clock, count, duration, percent, printable, ranks as rankWords, size, speed } from "./words.js";

const BARS_MAX = 8, ERRORS_MAX = 12, SLOWEST = 3;
const name = (text) => h("bdi", null, printable(text));
const badge = (text, mood) => h("span", { class: `badge ${mood}` }, text);
const number = (text) => h("td", { class: "number" }, text);

/** The head of the page. `lost`: since when the daemon has not answered, null while it does. */
export function head(status, lost) {
  const state = lost !== null ? badge("not answering", "bad") : status.leaving ? badge("leaving", "doubt") : badge("serving", "good");
  return h(
    "header",
    { id: "head" },
    h("h1", null, "checkpointd", h("span", { class: "host" }, " on ", name(status.host))),
    state,
    h("span", { class: "quiet" }, `up ${duration(status.now - status.started_at)}, as of ${clock(status.now)}`),
  );
}

export function view(status, ui) {
  const roots = status.roots;
  return h(
    "main",
    { id: "view", class: ui.lost ? "stale" : null },
    status.leaving && h("p", { class: "note doubt" }, "The daemon was told to stop: what is in flight is being finished, and nothing new is taken."),
    roots.length > 1 && contents(roots),
    roots.length === 0 && nothingYet(status),
    roots.map((root, at) => rootSection(root, at, status, ui)),
    memory(status),
    daemon(status),
  );
}

function nothingYet(status) {
  return h(
    "section",
    { class: "card" },
    h("h2", null, "No trainer has come yet"),
    h("p", null, "A job uses this daemon with ", h("code", null, `Checkpointer(root, sidecar="${printable(status.socket)}")`), "."),
  );
}

function contents(roots) {
  const state = (root) => (root.problem ? badge("problem", "bad") : root.in_flight.length ? badge("saving", "busy") : null);
  return h("nav", { "aria-label": "Roots" }, h("ul", null, roots.map((root, at) => h("li", null, h("a", { href: `#root-${at}` }, name(root.root)), state(root)))));
}

// --- one root ----------------------------------------------------------------------------------------------------

function rootSection(root, at, status, ui) {
  return h(
    "section",
    { class: "card root", id: `root-${at}`, "aria-labelledby": `title-${at}`, "data-key": root.root },
    h("h2", { id: `title-${at}`, class: "path" }, name(root.root)),
    root.problem && h("p", { class: "note bad", role: "alert" }, "This root cannot be looked at: ", name(root.problem.message)),
    tiles(root, status.now),
    inFlight(root, status.now, ui),
    errors(root, status.now),
    timeline(root, status.now, ui),
    h("div", { class: "columns" }, checkpoints(root, status.now), ranksOf(root, ui)),
  );
}

function tile(label, value, note) {
  return h("div", { class: "tile" }, h("dt", null, label), h("dd", null, value, note && h("small", null, note)));
}

function tiles(root, now) {
  const connected = root.ranks.filter((rank) => rank.connected).length;
  const world = Math.max(0, ...root.ranks.map((rank) => rank.world_size));
  const sorted = [...root.commit_s].sort((a, b) => a - b);
  const stall = Math.max(0, ...root.ranks.map((rank) => (rank.saves_committed + rank.saves_failed ? rank.stall_s / (rank.saves_committed + rank.saves_failed) : 0)));
  return h(
    "dl",
    { class: "tiles" },
    tile("Latest", root.latest === null ? "none" : name(root.latest), root.newest_step === null ? null : `newest step ${root.newest_step.toLocaleString("en")}`),
    tile("Newest commit", root.newest_committed_at === null ? "–" : ago(now - root.newest_committed_at), root.newest_committed_at === null ? null : clock(root.newest_committed_at, now)),
    tile("Save to commit", sorted.length ? duration(sorted[Math.floor(sorted.length / 2)]) : "–", sorted.length ? `median of the last ${sorted.length}` : "known on the node of rank 0"),
    tile("Training held", duration(stall), "per save, slowest rank"),
    tile("Ranks here", `${connected} of ${root.ranks.length}`, `connected; ${count(world, "rank")} in the job`),
  );
}

// --- in flight ---------------------------------------------------------------------------------------------------

function inFlight(root, now, ui) {
  const flying = attempts(root.in_flight, now);
  return h(
    "section",
    { class: "part", "aria-label": "Saves in flight" },
    h("h3", null, flying.length ? "In flight" : "Nothing is in flight"),
    flying.map((attempt) => flight(attempt, now, ui)),
  );
}

const SHOWN = [["staging", "staging"], ["staged", "staged"], ["persisting", "persisting"], ["prepared", "voted"], ["failed", "failed"], ["fenced", "fenced"], ["skipped", "skipped"]];

function flight(attempt, now, ui) {
  const p = progress(attempt);
  const label = `${printable(attempt.tag)}: persisted`;
  return h(
    "article",
    { class: "flight", "data-key": attempt.key },
    h("h4", null, name(attempt.tag), " ", h("small", null, `attempt ${attempt.attempt} · step ${attempt.step.toLocaleString("en")} · for ${duration(now - attempt.began)}`)),
    h("div", { class: "bar" }, h("progress", { max: 1, value: p.fraction.toFixed(4), "aria-label": label }), h("output", null, percent(p.fraction))),
    h("p", { class: "facts" }, facts(attempt, p).join(" · ")),
    h("p", { class: "facts" }, waiting(p.missing)),
    attempt.saves.length <= BARS_MAX ? rankBars(attempt) : strip(attempt, ui.width - 48),
  );
}

function facts(attempt, p) {
  const phases = SHOWN.map(([phase, word]) => [attempt.saves.filter((save) => save.phase === phase).length, word]);
  const told = phases.filter(([n]) => n).map(([n, word]) => `${n} ${word}`);
  if (p.total) told.push(`${size(p.done)} of ${size(p.total)}`);
  if (p.speed) told.push(speed(p.speed));
  if (p.eta !== null) told.push(`about ${duration(p.eta)} left`);
  return told;
}

function waiting(missing) {
  if (missing === null) return "Votes are counted on the node of rank 0.";
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
  if (save.phase !== "persisting") return save.phase === "prepared" ? "voted" : save.phase;
  const left = save.eta_s === null ? "" : `, ${duration(save.eta_s)} left`;
  return `${percent(fraction(save))}${save.speed_bps ? `, ${speed(save.speed_bps)}` : ""}${left}`;
}

/** Many ranks: a column for each one, as high as it has come. */
function strip(attempt, width) {
  const n = attempt.saves.length, tall = 48;
  const wide = Math.max(1, Math.min(16, Math.floor(width / n))), gap = wide > 4 ? 1 : 0;
  const column = (save, at, part) => `M${at * wide} ${tall}v${(-tall * part).toFixed(1)}h${wide - gap}V${tall}z`;
  const parts = (phase) => attempt.saves.map((save, at) => ((save.phase === "prepared") === (phase === "voted") ? column(save, at, fraction(save)) : "")).join("");
  const slow = attempt.saves.filter((save) => save.phase !== "prepared").sort((a, b) => fraction(a) - fraction(b)).slice(0, SLOWEST);
  const words = slow.map((save) => `rank ${save.rank} (${save.phase === "persisting" ? percent(fraction(save)) : save.phase})`).join(", ");
  return h(
    "div",
    { class: "strip" },
    s(
      "svg",
      { role: "img", "aria-label": `Progress of ${n} ranks`, width: n * wide, height: tall, "data-strip": attempt.key },
      s("rect", { class: "track", width: n * wide, height: tall }),
      s("path", { class: "seg persisting", d: parts("") }),
      s("path", { class: "seg voted", d: parts("voted") }),
    ),
    h("p", { class: "facts" }, `A column for each of ranks ${attempt.saves[0].rank} to ${attempt.saves.at(-1).rank}`, words && `; furthest behind: ${words}`, "."),
  );
}

// --- what went wrong ---------------------------------------------------------------------------------------------

function errors(root, now) {
  const wrong = attempts(root.recent.filter((save) => save.error !== null), now).reverse();
  if (!wrong.length) return null;
  const more = wrong.length - ERRORS_MAX;
  return h(
    "section",
    { class: "part", "aria-label": "Saves that failed" },
    h("h3", null, `${wrong.length} of the last saves did not commit`),
    wrong.slice(0, ERRORS_MAX).map((attempt) => failure(attempt, now)),
    more > 0 && h("p", { class: "quiet" }, `${more} older ones are in the log.`),
  );
}

function failure(attempt, now) {
  const causes = new Map();
  for (const save of attempt.saves) {
    const key = JSON.stringify([save.phase, save.error.code, save.error.message]);
    causes.set(key, [...(causes.get(key) ?? []), save]);
  }
  return h(
    "article",
    { class: "failure", "data-key": attempt.key },
    h("h4", null, name(attempt.tag), " ", h("small", null, `attempt ${attempt.attempt} · ${clock(attempt.ended, now)}, ${ago(now - attempt.ended)}`)),
    [...causes.values()]
      .sort((a, b) => rankOf(a[0].phase) - rankOf(b[0].phase))
      .map((saves) => h("p", null, h("strong", null, `${rankWords(saves.map((save) => save.rank))} ${saves[0].phase}`), ": ", name(saves[0].error.message), " ", h("code", { class: "code" }, saves[0].error.code))),
    [...new Set(attempt.saves.map((save) => save.advice))].filter(Boolean).map((advice) => h("p", { class: "advice" }, name(advice))),
  );
}

/** What failed by itself comes before what was aborted because of it. */
const rankOf = (phase) => ["fenced", "failed", "skipped", "aborted"].indexOf(phase);

// --- the picture -------------------------------------------------------------------------------------------------

function timeline(root, now, ui) {
  const drawn = layout(root, now, ui.width, ui.sameScale);
  ui.drawn.set(root.root, drawn);
  if (drawn === null) return null;
  const opened = ui.opened.has(`table ${root.root}`);
  return h(
    "section",
    { class: "part", "aria-label": "Timeline of the last saves" },
    h("h3", null, "The last saves, rank by rank"),
    h("div", { class: "over" }, legend(), h("label", null, h("input", { type: "checkbox", "data-action": "scale", checked: ui.sameScale }), " one time scale for all")),
    h("div", { class: "picture" }, picture(drawn, now, root.root)),
    h("details", { "data-key": `table ${root.root}`, "data-details": `table ${root.root}` }, h("summary", null, "The same as a table"), opened && table(drawn, now)),
  );
}

// --- what is there -----------------------------------------------------------------------------------------------

function checkpoints(root, now) {
  const held = (c) => root.held.filter((one) => one.tag === c.tag && one.attempt === c.attempt).length;
  const rows = root.checkpoints.map((c) =>
    h(
      "tr",
      { class: c.is_latest ? "latest" : null },
      h("td", null, name(c.tag), c.is_latest && [" ", badge("latest", "good")], held(c) > 0 && [" ", badge("in memory", "quiet")]),
      number(c.step.toLocaleString("en")),
      number(when(c.committed_at, now)),
      number(String(c.world_size)),
    ),
  );
  const titles = ["Tag", "Step", "Committed", "Ranks"];
  return h(
    "section",
    { class: "part", "aria-label": "Checkpoints" },
    h("h3", null, rows.length ? "Checkpoints, newest first" : "No checkpoint is known yet"),
    rows.length > 0 && scrolled("Checkpoints", titles, [0], rows),
  );
}

function when(text, now) {
  const time = Date.parse(text) / 1000;
  return Number.isNaN(time) ? printable(text) : h("time", { datetime: text, title: text }, ago(now - time));
}

function scrolled(label, titles, words, rows) {
  const header = titles.map((title, at) => h("th", { scope: "col", class: words.includes(at) ? null : "number" }, title));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", null, h("thead", null, h("tr", null, header)), h("tbody", null, rows)));
}

function ranksOf(root, ui) {
  if (!root.ranks.length) return null;
  const gone = root.ranks.filter((rank) => !rank.connected).map((rank) => rank.rank);
  const note = gone.length ? `No trainer is connected for ${rankWords(gone)}.` : "All trainers of this node are connected.";
  const many = root.ranks.length > 32, key = `ranks ${root.root}`;
  const rows = () => scrolled("Ranks", ["Rank", "Process", "Epoch", "Committed", "Failed", "Persisted", "Stored", "Held up"], [1], root.ranks.map(rankRow));
  return h(
    "section",
    { class: "part", "aria-label": "Ranks" },
    h("h3", null, "Ranks of this node"),
    h("p", { class: "facts" }, note),
    many ? h("details", { "data-key": key, "data-details": key }, h("summary", null, `All ${root.ranks.length} ranks`), ui.opened.has(key) && rows()) : rows(),
  );
}

function rankRow(rank) {
  return h(
    "tr",
    null,
    number(String(rank.rank)),
    h("td", null, rank.connected ? String(rank.pid) : badge("gone", "doubt")),
    number(rank.epoch === null ? "–" : String(rank.epoch)),
    number(rank.saves_committed.toLocaleString("en")),
    h("td", { class: rank.saves_failed ? "number bad" : "number" }, rank.saves_failed.toLocaleString("en")),
    number(size(rank.bytes_persisted)),
    number(size(rank.bytes_stored)),
    number(duration(rank.stall_s)),
  );
}

// --- the daemon --------------------------------------------------------------------------------------------------

function meter(label, used, limit, note) {
  return h(
    "div",
    { class: "meter" },
    h("span", null, label),
    h("progress", { max: Math.max(1, limit), value: Math.min(used, Math.max(1, limit)), "aria-label": label }),
    h("span", { class: "quiet" }, `${size(used)} of ${size(limit)}${note}`),
  );
}

function memory(status) {
  const m = status.memory;
  const held = status.roots.flatMap((root) => attempts(root.held.map((one) => ({ ...one, began_at: one.step, ended_at: null })), 0).map((a) => [root, a]));
  const line = ([root, a]) => {
    const nbytes = a.saves.reduce((sum, one) => sum + one.nbytes, 0);
    return h("li", null, name(a.tag), ` of ${rankWords(a.saves.map((one) => one.rank))}, ${size(nbytes)}, ${a.saves.every((one) => one.phase === "committed") ? "committed" : "not committed yet"}`, status.roots.length > 1 && h("small", null, name(root.root)));
  };
  return h(
    "section",
    { class: "card", "aria-label": "Memory" },
    h("h2", null, "Memory for restarts"),
    meter("Snapshots held", m.held, m.held_max, ""),
    meter("Snapshots mapped", m.mapped, m.mapped_max, ""),
    held.length ? h("ul", { class: "plain" }, held.map(line)) : h("p", { class: "facts" }, "No snapshot is held: a trainer that starts again loads from the store."),
  );
}

function daemon(status) {
  const facts = [
    ["Release", status.release],
    ["Process", String(status.pid)],
    ["Socket", name(status.socket)],
    ["Running since", clock(status.started_at, status.now)],
    ["Connections", `${status.clients} of ${status.clients_max}`],
    ["Refused", status.refused.toLocaleString("en")],
    ["Bandwidth limit", status.bandwidth_bps === null ? "none" : speed(status.bandwidth_bps)],
  ];
  return h(
    "section",
    { class: "card", "aria-label": "The daemon" },
    h("h2", null, "The daemon"),
    h("dl", { class: "pairs" }, facts.map(([label, value]) => h("div", null, h("dt", null, label), h("dd", null, value)))),
    h("p", { class: "facts" }, "For machines: ", h("a", { href: "api/status" }, "status as JSON"), " and ", h("a", { href: "metrics" }, "metrics for Prometheus"), "."),
  );
}
