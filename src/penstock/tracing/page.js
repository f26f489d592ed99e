"use strict";
(() => {
const started = performance.now();
const D = JSON.parse(document.getElementById("trace").textContent);
const A = D.about, $ = id => document.getElementById(id);
const STATUS = ["created", "running", "success", "fail", "halt"], MARK = ["·", "…", "✓", "✗", "■"];
const KIND = ["llm", "tool", "step", "agent", "run"], ROW = 26;
const calls = D.calls.map(([id, up, kind, name, model, status, at, took, cost, tin, tout, why, error, retries,
  iteration, context, meta], n) => ({n, id, up, kind, name, model, status, at, took, cost, tin, tout, why, error,
  retries, iteration, context, meta, below: [], open: true, depth: 0, total: cost}));
const tops = [];
for (const c of calls) {
  if (c.up >= 0) { calls[c.up].below.push(c); c.depth = calls[c.up].depth + 1; } else tops.push(c);
}
for (let i = calls.length - 1; i >= 0; i--) if (calls[i].up >= 0) calls[calls[i].up].total += calls[i].total;
const span = Math.max(A.duration_ms, ...calls.length < 1e5 ? [calls.reduce((m, c) => Math.max(m, c.at + c.took), 0)]
  : [], 0.001);

const el = (tag, cls, text) => {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (text !== undefined && text !== null) element.textContent = text;
  return element;
};
const usd = x => "$" + (x === 0 ? "0.00" : x.toFixed(Math.max(2, Math.min(9, 3 - Math.floor(Math.log10(x)))))
  .replace(/(\.\d\d+?)0+$/, "$1"));
const ms = x => x < 1 ? (x * 1000).toFixed(0) + " µs" : x < 1000 ? x.toFixed(1) + " ms" : x < 60000 ?
  (x / 1000).toFixed(2) + " s" : Math.floor(x / 60000) + " min " + (x % 60000 / 1000).toFixed(0) + " s";
const amount = (unit, x) => unit === "usd" ? usd(x) : unit === "seconds" ? ms(x * 1000) : Math.round(x)
  .toLocaleString("en");

function total(S) {
  if (!S.unknown_costs) return usd(S.total_cost);
  const calls = S.unknown_costs.toLocaleString("en") + (S.unknown_costs === 1 ? " call" : " calls");
  return S.total_cost ? "at least " + usd(S.total_cost) + ", " + calls + " unknown" : "unknown (" + calls + ")";
}
function summary() {
  const status = STATUS.indexOf(A.status), S = A.stats;
  $("mark").textContent = MARK[status]; $("mark").className = A.status;
  $("name").textContent = A.name || "run";
  $("ending").textContent = A.termination_reason || A.status; $("ending").classList.add(A.status);
  $("why").textContent = [A.error_class, A.stop_reason].filter(Boolean).join(": ");
  const figures = [["cost", total(S)], ["took", ms(A.duration_ms)],
    ["model calls", S.model_call_count.toLocaleString("en")], ["tool calls", S.tool_call_count.toLocaleString("en")],
    ["tokens in → out", S.total_input_tokens.toLocaleString("en") + " → " + S.total_output_tokens.toLocaleString("en")],
    ["failed", S.failed_count], ["halted", S.halted_count],
    ["began", A.start_ts_ms === null ? "–" :
      new Date(A.start_ts_ms).toISOString().replace("T", " ").slice(0, 19) + " UTC"],
    ["run", A.run_id]];
  for (const [name, value] of figures) {
    const one = el("div"); one.append(el("dt", "", name), el("dd", "", value)); $("figures").append(one);
  }
  for (const m of [...A.limits].sort((a, b) => b.tripped - a.tripped)) {
    const share = m.ceiling ? m.used / m.ceiling : 1, held = m.ceiling ? m.held / m.ceiling : 0;
    const box = el("div", "meter" + (m.tripped ? " tripped" : share >= 0.8 ? " near" : ""));
    const top = el("b"), figures = el("span"), bar = el("div", "bar"), used = el("i"), open = el("u");
    top.append(el("span", "", m.unit), el("span", "", m.tripped ? "■ stopped · " + m.budget : m.budget));
    figures.append(el("span", "", amount(m.unit, m.used) + " / " + amount(m.unit, m.ceiling)),
      el("span", "", Math.round(share * 100) + " %"));
    used.style.width = Math.min(100, share * 100) + "%"; open.style.width = Math.min(100, held * 100) + "%";
    bar.append(used, open);
    bar.setAttribute("role", "meter"); bar.setAttribute("aria-label", m.unit + " of " + m.budget);
    bar.setAttribute("aria-valuemin", 0); bar.setAttribute("aria-valuemax", m.ceiling);
    bar.setAttribute("aria-valuenow", m.used);
    box.title = m.unit + " of " + m.budget; box.append(top, figures, bar); $("meters").append(box);
  }
}

const list = $("list"), rowsBox = $("rows");
let view = "tree", shown = [], picked = 0, wanted = "";
const words = c => (c.name + " " + (c.model || "") + " " + STATUS[c.status] + " " + KIND[c.kind] + " " + c.id + " " +
  (c.why || "") + " " + (c.error || "") + " " + D.contexts[c.context]).toLowerCase();

function visibleCalls() {
  let keep = null, found = 0;
  if (wanted) {
    keep = new Uint8Array(calls.length);
    for (let i = calls.length - 1; i >= 0; i--) {
      if (words(calls[i]).includes(wanted)) {
        found++;
        for (let n = i; n >= 0 && !keep[n]; n = calls[n].up) keep[n] = 1;
      }
    }
  }
  const out = [], stack = tops.slice().reverse();
  while (stack.length) {
    const c = stack.pop();
    if (keep && !keep[c.n]) continue;
    out.push(c);
    if (c.open || keep) for (let i = c.below.length - 1; i >= 0; i--) stack.push(c.below[i]);
  }
  $("found").textContent = wanted ? found.toLocaleString("en") + " found" : "";
  return out;
}
function visibleEvents() {
  if (!wanted) { $("found").textContent = ""; return D.events; }
  const out = D.events.filter(e => (D.kinds[e[2]] + " " + D.contexts[e[3]] + " " + e[5] + " " +
    (e[4] >= 0 ? calls[e[4]].name + " " + calls[e[4]].id : "")).toLowerCase().includes(wanted));
  $("found").textContent = out.length.toLocaleString("en") + " found";
  return out;
}

function callRow(c, at) {
  const row = el("div", "row"), what = el("div", "what"), track = el("div", "track"), bar = el("i", KIND[c.kind]);
  row.setAttribute("role", "treeitem"); row.setAttribute("aria-level", c.depth + 1);
  const twist = el("span", "twist", c.below.length ? (c.open || wanted ? "▾" : "▸") : "");
  if (c.below.length) row.setAttribute("aria-expanded", c.open);
  twist.style.marginLeft = Math.min(c.depth, 24) * 14 + "px";
  twist.addEventListener("click", event => { event.stopPropagation(); c.open = !c.open; refresh(); });
  const mark = el("span", STATUS[c.status], MARK[c.status]); mark.title = STATUS[c.status];
  mark.setAttribute("aria-label", STATUS[c.status]);
  const dot = el("span", "dot " + KIND[c.kind]); dot.title = KIND[c.kind];
  what.append(twist, mark, dot, el("span", "label", c.name));
  if (c.model && c.model !== c.name) what.append(el("span", "model", c.model));
  if (c.meta && c.meta.skip) what.append(el("span", "model", "skipped after " + c.meta.skip));
  else if (c.meta && c.meta.fallback) what.append(el("span", "model", "fallback " + c.meta.fallback));
  else if (c.meta && c.meta.attempt) what.append(el("span", "model", "attempt " + c.meta.attempt));
  if (c.status > 2 && (c.error || c.why)) what.append(el("span", "why " + STATUS[c.status],
    c.status === 3 ? c.error : c.why.split(":")[0]));
  bar.style.left = c.at / span * 100 + "%"; bar.style.width = c.took / span * 100 + "%";
  track.append(bar);
  const cost = el("span", "num", c.total ? usd(c.total) : c.meta && c.meta.cost_unknown ? "unknown" : ""); if (c.below.length) cost.classList.add("dim");
  row.append(what, cost, el("span", "num", ms(c.took)), track);
  return row;
}
function eventRow(e) {
  const row = el("div", "row"), kind = D.kinds[e[2]], c = e[4] >= 0 ? calls[e[4]] : null;
  const alarm = /limit|safety|error|divergence/.test(kind) ? " alarm" : "";
  row.setAttribute("role", "option");
  row.append(el("span", "seq", e[0]), el("span", "num", ms(Math.max(0, e[1]))), el("span", "kind" + alarm, kind),
    el("span", "where", D.contexts[e[3]]), el("span", "text", [c ? c.name : "", e[5]].filter(Boolean).join(" · ")));
  return row;
}

let frameRequest = 0;
function paint() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 8);
  const fragment = document.createDocumentFragment();
  for (let at = first; at < last; at++) {
    const row = view === "events" ? eventRow(shown[at]) : callRow(shown[at], at);
    row.id = "row" + at; row.style.top = at * ROW + "px";
    row.setAttribute("aria-selected", at === picked);
    row.setAttribute("aria-setsize", shown.length); row.setAttribute("aria-posinset", at + 1);
    row.addEventListener("click", () => pick(at));
    fragment.append(row);
  }
  rowsBox.replaceChildren(fragment);
  list.setAttribute("aria-activedescendant", "row" + picked);
}
const later = () => { if (!frameRequest) frameRequest = requestAnimationFrame(() => { frameRequest = 0; paint(); }); };
function refresh() {
  shown = view === "events" ? visibleEvents() : visibleCalls();
  picked = Math.max(0, Math.min(picked, shown.length - 1));
  // Browsers cannot show boxes of tens of millions of pixels; 50,000 rows are far below that.
  rowsBox.style.height = shown.length * ROW + "px";
  paint();
  if (view === "time" || view === "cost") flame();
}
function pick(at) {
  if (!shown.length) return;
  picked = Math.max(0, Math.min(at, shown.length - 1));
  const top = picked * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  paint();
  const c = view === "events" ? calls[shown[picked][4]] : shown[picked];
  detail(c, view === "events" ? shown[picked] : null);
}
function detail(c, event) {
  const box = $("detail"), fields = el("dl");
  const add = (name, value, mono) => {
    if (value === null || value === undefined || value === "" || value === 0) return;
    fields.append(el("dt", "", name), el("dd", mono ? "mono" : "", value));
  };
  if (event) { add("event", D.kinds[event[2]]); add("seq", event[0]); add("details", event[5]); }
  if (c) {
    const status = el("dd", STATUS[c.status], MARK[c.status] + " " + STATUS[c.status]);
    fields.append(el("dt", "", "status"), status);
    add("error", c.error); add("reason", c.why); add("model", c.model);
    add("cost", c.cost ? usd(c.cost) : c.meta && c.meta.cost_unknown ? "unknown" : ""); add("cost with everything below", c.below.length ? usd(c.total) : "");
    add("tokens in → out", c.tin || c.tout ? (c.tin || 0) + " → " + (c.tout || 0) : "");
    add("began after", ms(c.at)); add("took", ms(c.took)); add("retries", c.retries);
    add("context", D.contexts[c.context]); add("iteration", c.iteration); add("calls below", c.below.length);
    add("metadata", c.meta ? JSON.stringify(c.meta, null, 1) : "", true); add("id", c.id, true);
  }
  box.replaceChildren(el("h2", "", c ? KIND[c.kind] + " · " + c.name : "event"), fields);
}

const canvas = $("canvas"), tip = $("tip");
let boxes = [], focus = null;
function lanes() {
  const ends = [], out = [];
  for (const c of [...calls].sort((a, b) => a.at - b.at || a.n - b.n)) {
    let lane = c.up >= 0 ? Math.min(calls[c.up].lane + 1, 199) : 0;
    while (lane < 199 && ends[lane] !== undefined && ends[lane] > c.at + 1e-9) lane++;
    ends[lane] = Math.max(ends[lane] || 0, c.at + c.took); c.lane = lane;
    out.push([c, c.at / span, c.took / span, lane]);
  }
  return out;
}
function shares() {
  const out = [], all = tops.reduce((sum, c) => sum + c.total, 0);
  if (!all) return out;
  const stack = []; let x = 0;
  for (const c of tops) { stack.push([c, x, 0]); x += c.total / all; }
  while (stack.length) {
    const [c, from, lane] = stack.pop(); out.push([c, from, c.total / all, lane]);
    let next = from;
    for (const child of c.below) if (child.total) { stack.push([child, next, lane + 1]); next += child.total / all; }
  }
  return out;
}
function flame() {
  const all = view === "time" ? lanes() : shares(), style = getComputedStyle(document.documentElement);
  const color = name => style.getPropertyValue("--" + name).trim(), H = 20;
  const width = $("flame").clientWidth - 2, deepest = all.reduce((m, b) => Math.max(m, b[3]), 0);
  const ratio = window.devicePixelRatio || 1, height = Math.max(60, (deepest + 1) * H + 26);
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.width = width + "px"; canvas.style.height = height + "px";
  const g = canvas.getContext("2d"); g.scale(ratio, ratio); g.font = "12px system-ui,sans-serif";
  const zoomed = focus === null ? null : all.find(b => b[0] === focus);
  const from = zoomed ? zoomed[1] : 0, size = zoomed ? Math.max(zoomed[2], 1e-9) : 1;
  g.fillStyle = color("dim"); g.textBaseline = "middle";
  const full = view === "time" ? span : tops.reduce((sum, c) => sum + c.total, 0);
  for (let i = 0; i <= 4; i++) {
    const value = (from + size * i / 4) * full, text = view === "time" ? ms(value) : usd(value);
    g.textAlign = i === 0 ? "left" : i === 4 ? "right" : "center"; g.fillText(text, width * i / 4, 10);
  }
  g.textAlign = "left"; boxes = [];
  for (const [c, at, share, lane] of all) {
    const x = (at - from) / size * width, w = share / size * width, y = 22 + lane * H;
    if (x > width || x + w < 0) continue;
    const left = Math.max(0, x), drawn = Math.max(1, Math.min(width, x + w) - left);
    g.globalAlpha = !wanted || words(c).includes(wanted) ? 1 : 0.2;
    g.fillStyle = color(KIND[c.kind]); g.fillRect(left, y, Math.max(0.6, drawn - 1), H - 2);
    if (c.status > 2) { g.fillStyle = color(c.status === 3 ? "bad" : "halt"); g.fillRect(left, y + H - 5, drawn, 3); }
    if (drawn > 34) {
      g.fillStyle = color("bg"); let text = c.name; const fits = Math.floor((drawn - 10) / 6.6);
      if (text.length > fits) text = text.slice(0, Math.max(1, fits - 1)) + "…";
      g.fillText(text, left + 5, y + H / 2 - 1);
    }
    boxes.push([left, y, drawn, H, c]);
  }
  g.globalAlpha = 1;
  canvas.setAttribute("aria-label", (view === "time" ? "Calls by time" : "Calls by cost") + ", " + all.length +
    " calls; the Calls view lists the same");
  if (!all.length) { g.fillStyle = color("dim"); g.fillText("No call has a cost.", 8, 40); }
}
const under = event => { for (let i = boxes.length - 1; i >= 0; i--) {
  const [x, y, w, h, c] = boxes[i];
  if (event.offsetX >= x && event.offsetX <= x + w && event.offsetY >= y && event.offsetY <= y + h) return c;
} return null; };
canvas.addEventListener("mousemove", event => {
  const c = under(event); tip.hidden = !c; if (!c) return;
  tip.textContent = MARK[c.status] + " " + c.name + (c.model ? " · " + c.model : "") + " · " + ms(c.took) +
    (c.total ? " · " + usd(c.total) : "");
  tip.style.left = Math.min(event.offsetX + 12, Math.max(0, canvas.clientWidth - 300)) + "px";
  tip.style.top = event.offsetY + 18 + "px";
});
canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
canvas.addEventListener("click", event => {
  const c = under(event); focus = c && c !== focus && c.below.length ? c : c === focus ? null : focus;
  if (c) detail(c, null); flame();
});

function show(next) {
  view = next; picked = 0; list.scrollTop = 0;
  const drawn = next === "time" || next === "cost";
  for (const name of ["tree", "time", "cost", "events"]) {
    $("tab-" + name).setAttribute("aria-selected", name === next);
    $("tab-" + name).tabIndex = name === next ? 0 : -1;
  }
  list.hidden = drawn; $("flame").hidden = !drawn; $("open").hidden = $("close").hidden = next !== "tree";
  list.setAttribute("role", next === "events" ? "listbox" : "tree");
  list.setAttribute("aria-label", next === "events" ? "Events" : "Calls");
  $("view").setAttribute("aria-labelledby", "tab-" + next);
  refresh();
}
const names = ["tree", "time", "cost", "events"];
names.forEach((name, at) => {
  $("tab-" + name).addEventListener("click", () => show(name));
  $("tab-" + name).addEventListener("keydown", event => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? 3 : 0;
    if (step) { show(names[(at + step) % 4]); $("tab-" + names[(at + step) % 4]).focus(); event.preventDefault(); }
  });
});
list.addEventListener("scroll", later, {passive: true});
list.addEventListener("keydown", event => {
  const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1), c = view === "tree" ? shown[picked] : null;
  const steps = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9};
  if (event.key in steps) pick(picked + steps[event.key]);
  else if (event.key === "ArrowRight" && c) {
    if (c.below.length && !c.open) { c.open = true; refresh(); } else if (c.below.length) pick(picked + 1);
  } else if (event.key === "ArrowLeft" && c) {
    if (c.below.length && c.open && !wanted) { c.open = false; refresh(); }
    else if (c.up >= 0) pick(shown.indexOf(calls[c.up]));
  } else if (event.key === "Enter" || event.key === " ") pick(picked);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", event => {
  if (event.target === $("filter")) {
    if (event.key === "Escape") { $("filter").value = ""; wanted = ""; refresh(); list.focus(); }
    if (event.key === "ArrowDown" && !list.hidden) { list.focus(); event.preventDefault(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { $("filter").focus(); event.preventDefault(); }
  else if (event.key >= "1" && event.key <= "4") show(names[event.key - 1]);
  else if (event.key === "Escape" && focus) { focus = null; flame(); }
});
$("filter").addEventListener("input", () => { wanted = $("filter").value.trim().toLowerCase(); list.scrollTop = 0;
  picked = 0; refresh(); });
const all = open => { for (const c of calls) c.open = open || c.up < 0; list.scrollTop = 0; refresh(); };
$("open").addEventListener("click", () => all(true));
$("close").addEventListener("click", () => all(false));
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" :
    matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark"; refresh();
});
new ResizeObserver(() => { later(); if (view === "time" || view === "cost") flame(); }).observe($("view"));

summary();
show(names.includes(location.hash.slice(1)) ? location.hash.slice(1) : "tree");
const missing = [[D.left_out[0], "calls"], [D.left_out[1], "events"], [A.dropped_events, "early events"]]
  .filter(([n]) => n).map(([n, what]) => n.toLocaleString("en") + " " + what + " are not on this page");
$("foot").textContent = [calls.length.toLocaleString("en") + " calls, " + D.events.length.toLocaleString("en") +
  " events", ...missing, "↑ ↓ ← → move, / filters, 1–4 change the view, Esc goes back"].join(" · ");
document.documentElement.dataset.ready = Math.round(performance.now() - started);
})();
