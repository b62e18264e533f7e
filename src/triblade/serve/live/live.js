// What the server does now: reads /metrics every two seconds and shows rates and quantiles over a window, and the plan beside them.

import {startChat} from "/live/chat.js";
import {drawLines, short} from "/live/charts.js";

const EVERY_MS = 2000, KEEP_S = 900, SMOOTH_S = 10;
const PREFIX = "triblade:";
const TTFT = "time_to_first_token_seconds", ITL = "inter_token_latency_seconds";
const byId = (id) => document.getElementById(id);
const snapshots = []; // {time, samples: Map of name -> [{labels, value}]}
let model = "";

// ---- reading

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
  const response = await fetch(path, {...options, headers});
  if (response.status === 401) {
    byId("key").hidden = false;
    throw Object.assign(new Error("an API key is needed"), {state: "key"});
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `status ${response.status}`);
  }
  return response;
}

function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.match(/^([\w:]+)(?:\{(.*)\})? (\S+)$/);
    if (!found || line.startsWith("#")) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((m) => [m[1], m[2]]));
    const name = found[1].startsWith(PREFIX) ? found[1].slice(PREFIX.length) : found[1];
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({labels, value: Number(found[3])});
  }
  return samples;
}

// ---- figures

const has = (snapshot, name) => snapshot.samples.has(name);
const total = (snapshot, name) => (snapshot.samples.get(name) ?? []).reduce((sum, {value}) => sum + value, 0);
const labelled = (snapshot, name, label, wanted) =>
  (snapshot.samples.get(name) ?? []).filter(({labels}) => labels[label] === wanted).reduce((sum, {value}) => sum + value, 0);
const growth = (then, now, name) => Math.max(0, total(now, name) - total(then, name));
const rate = (then, now, name) => growth(then, now, name) / Math.max(now.time - then.time, 1e-9);
const share = (part, whole) => whole > 0 ? part / whole : NaN;

// A quantile of the observations between two snapshots, interpolated inside its bucket, in ms.
function quantile(then, now, name, q) {
  const before = new Map((then.samples.get(`${name}_bucket`) ?? []).map(({labels, value}) => [labels.le, value]));
  const buckets = (now.samples.get(`${name}_bucket`) ?? [])
    .map(({labels, value}) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value - (before.get(labels.le) ?? 0)])
    .sort(([a], [b]) => a - b);
  const count = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (!count) return null;
  let lower = 0, below = 0;
  for (const [upper, upTo] of buckets) {
    if (upTo >= q * count) return 1e3 * (upper === Infinity ? lower : lower + (upper - lower) * share(q * count - below, upTo - below));
    [lower, below] = [upper, upTo];
  }
  return null;
}

// The oldest snapshot that is at most `seconds` older than `now`.
function since(seconds, now = snapshots[snapshots.length - 1]) {
  return snapshots.find(({time}) => time >= now.time - seconds) ?? now;
}

// ---- showing

function showTiles(parent, rows) {
  parent.replaceChildren(...rows.map(([title, value]) => {
    const tile = document.createElement("div");
    tile.className = "tile";
    tile.append(Object.assign(document.createElement("b"), {textContent: value}));
    tile.append(Object.assign(document.createElement("span"), {textContent: title}));
    return tile;
  }));
}

const percent = (value) => Number.isFinite(value) ? `${(100 * value).toFixed(0)} %` : "–";
const pair = (then, now, name) => [0.5, 0.99].map((q) => short(quantile(then, now, name, q) ?? NaN)).join(" / ");

function showNow(then, now) {
  const steps = growth(then, now, "spec_decode_num_steps_total");
  const drafted = growth(then, now, "spec_decode_num_accepted_tokens_total");
  showTiles(byId("tiles"), [
    ["sequences running", short(total(now, "num_requests_running"))],
    ["waiting", short(total(now, "num_requests_waiting"))],
    ["output tokens/s", short(rate(then, now, "generation_tokens_total"))],
    ["prompt tokens/s", short(rate(then, now, "prompt_tokens_total"))],
    ["first token, ms, p50 / p99", pair(then, now, TTFT)],
    ["between tokens, ms, p50 / p99", pair(then, now, ITL)],
    ["KV cache used", percent(total(now, "kv_cache_usage_perc"))],
    ["prompt found in the prefix cache", percent(share(growth(then, now, "prefix_cache_hits_total"), growth(then, now, "prefix_cache_queries_total")))],
    ["requests ended", short(growth(then, now, "request_success_total"))],
    ["preemptions", short(growth(then, now, "num_preemptions_total"))],
    ["tokens per step", steps ? short(1 + drafted / steps) : "–"],
    ["memory, MiB", short(total(now, "process_resident_memory_bytes") / 2 ** 20)],
  ]);
}

function showCharts(seconds, now) {
  const shown = snapshots.filter(({time}) => time >= now.time - seconds);
  const line = (name, value) => ({name, points: shown.map((one) => [now.time - one.time, value(since(SMOOTH_S, one), one)])});
  const speed = (metric) => (then, one) => one === then ? null : rate(then, one, metric);
  drawLines(byId("throughput"), [line("output", speed("generation_tokens_total")), line("prompt", speed("prompt_tokens_total"))], seconds);
  drawLines(byId("ttft"), [0.5, 0.99].map((q) => line(`p${100 * q}`, (then, one) => quantile(then, one, TTFT, q))), seconds);
  drawLines(byId("itl"), [0.5, 0.99].map((q) => line(`p${100 * q}`, (then, one) => quantile(then, one, ITL, q))), seconds);
  drawLines(byId("sequences"), [line("running", (_, one) => total(one, "num_requests_running")), line("waiting", (_, one) => total(one, "num_requests_waiting"))], seconds);
}

function showDrafts(then, now) {
  const drafted = now.samples.get("spec_decode_num_draft_tokens_per_pos_total") ?? [];
  byId("drafts").hidden = !drafted.length;
  const grown = (name, position) => Math.max(0, labelled(now, name, "position", position) - labelled(then, name, "position", position));
  byId("acceptance").replaceChildren(...drafted.map(({labels: {position}}) => {
    const part = share(grown("spec_decode_num_accepted_tokens_per_pos_total", position), grown("spec_decode_num_draft_tokens_per_pos_total", position));
    const bar = document.createElement("div");
    const height = document.createElement("i");
    height.style.height = `${Number.isFinite(part) ? Math.max(1, 80 * part) : 1}px`;
    bar.append(percent(part), height, String(Number(position) + 1));
    return bar;
  }));
  const accepted = growth(then, now, "spec_decode_num_accepted_tokens_total"), all = growth(then, now, "spec_decode_num_draft_tokens_total");
  byId("drafts-summary").textContent = `${short(all)} tokens drafted, ${percent(share(accepted, all))} of them kept; by position:`;
}

function showTransfers(then, now) {
  byId("transfers").hidden = !has(now, "prefill_workers");
  if (!has(now, "prefill_workers")) return;
  const byRole = (role) => Math.max(0, labelled(now, "prefill_tokens_total", "role", role) - labelled(then, "prefill_tokens_total", "role", role));
  showTiles(byId("transfer-tiles"), [
    ["prefill workers", short(total(now, "prefill_workers"))],
    ["tokens waiting there", short(total(now, "prefill_backlog_tokens"))],
    ["prompt tokens computed there", percent(share(byRole("prefill"), byRole("prefill") + byRole("decode")))],
    ["KV received, MB/s", short(rate(then, now, "kv_transfer_wire_bytes_total") / 1e6)],
    ["KV smaller on the wire, times", short(total(now, "kv_transfer_ratio"))],
    ["transfers failed", short(labelled(now, "kv_transfers_total", "outcome", "failed") - labelled(then, "kv_transfers_total", "outcome", "failed"))],
    ["sent in another codec", short(growth(then, now, "kv_transfer_fallbacks_total"))],
  ]);
}

function showPlan(plan) {
  byId("plan").hidden = !plan.served;
  const seen = new Map(plan.findings.map((finding) => [finding.name, finding]));
  const rows = plan.prediction.map(({name, value, unit, label}) => [`${name}, ${unit}`, value, seen.get(name), label]);
  const rest = plan.findings.filter(({name}) => !plan.prediction.some((figure) => figure.name === name));
  rows.push(...rest.map((finding) => [finding.title, finding.assumed, finding, "assumed"]));
  byId("plan-rows").replaceChildren(...rows.map(([title, planned, finding, label]) => {
    const row = document.createElement("tr");
    const cells = [title, short(planned), finding ? short(finding.seen) : "", finding?.drifted ? `${label}, not what is seen` : label];
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), {textContent: text})));
    row.classList.toggle("drifted", Boolean(finding?.drifted));
    return row;
  }));
  byId("plan-reasons").replaceChildren(...plan.reasons.map((text) => Object.assign(document.createElement("li"), {textContent: text})));
}

function show() {
  const now = snapshots[snapshots.length - 1], seconds = Number(byId("window").value), then = since(seconds);
  showNow(then, now);
  showCharts(seconds, now);
  showDrafts(then, now);
  showTransfers(then, now);
}

function setStatus(state, text) {
  byId("status").dataset.state = state;
  byId("status").textContent = text;
}

// ---- the loop

async function readModel() {
  const list = await (await ask("/v1/models")).json();
  model = list.data[0].id;
  byId("model").textContent = model;
  setStatus("ready", "ready");
}

async function look() {
  try {
    const text = await (await ask("/metrics")).text();
    snapshots.push({time: performance.now() / 1e3, samples: parse(text)});
    while (snapshots[0].time < snapshots[snapshots.length - 1].time - KEEP_S) snapshots.shift();
    show();
    showPlan(await (await ask("/plan")).json());
    await readModel();
  } catch (error) {
    setStatus(error.state ?? "down", error.message);
  }
  setTimeout(look, EVERY_MS);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key-value").value);
  byId("key").hidden = true;
});
byId("window").addEventListener("change", () => snapshots.length && show());
startChat(ask, () => model);
look();
