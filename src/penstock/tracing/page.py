"""A run as one HTML page that needs nothing else.

The page is a file: it loads nothing, sends nothing, and its policy forbids both. The data stands in it as JSON; the
script builds every element from text, never from markup, so that a name is only ever a name. Rows are made for what is
on the screen, so ten thousand calls open as fast as ten. Knows the data of `trace_data`, and nothing of runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.tracing.redaction import redact
from penstock.tracing.tree import Traced, trace_data

MAX_ROWS = 50_000
"""The most calls, and the most events, that a page holds; it says how many more there were."""

STATUSES = ("created", "running", "success", "fail", "halt")
KINDS = ("llm", "tool", "step", "agent", "run")
OF_EVERY_EVENT = frozenset(("kind", "run_id", "seq", "at_ms", "source", "depth", "iteration", "parent_id", "node_id"))
TOLD_BY_CALLS = frozenset(("call_kind", "name", "model", "metadata", "duration_ms", "input_tokens", "output_tokens"))
MAX_EVENT_TEXT = 300


def trace_html(of: Traced, *, secrets: Iterable[str] = (), title: str | None = None) -> str:
    """The run, or a context's part of it, as one page: limits, call tree, timeline, costs and events."""
    data = trace_data(of, secrets=secrets)
    shown = (
        redact(title, secrets) if title else f"{data['name'] or 'run'} · {data['termination_reason'] or data['status']}"
    )
    policy = (
        f"default-src 'none'; script-src '{_hash(SCRIPT)}'; style-src '{_hash(STYLE)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="referrer" content="no-referrer">\n',
            f"<title>{html.escape(shown)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
            BODY,
            f'<script type="application/json" id="trace">{embedded(compact(data))}</script>\n',
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        )
    )


def embedded(data: object) -> str:
    """JSON text that may stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def compact(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a trace as the page reads it: calls and events as rows, with what repeats in tables."""
    calls, events = data["calls"][:MAX_ROWS], data["events"][:MAX_ROWS]
    at = {call["node_id"]: number for number, call in enumerate(calls)}
    contexts, kinds = _Table(), _Table()
    about = {name: value for name, value in data.items() if name not in ("calls", "events")}
    start_ms = data["start_ts_ms"] or 0
    return {
        "about": about,
        "calls": [_call_row(call, at, contexts) for call in calls],
        "events": [_event_row(event, at, start_ms, contexts, kinds) for event in events],
        "contexts": contexts.values,
        "kinds": kinds.values,
        "left_out": [len(data["calls"]) - len(calls), len(data["events"]) - len(events)],
    }


class _Table:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.values))
        if number == len(self.values):
            self.values.append(text)
        return number


def _call_row(call: Mapping[str, Any], at: Mapping[str, int], contexts: _Table) -> list[Any]:
    kind = call["kind"]
    if kind == "system":
        kind = "step" if not call["is_context"] else "agent" if call["parent_id"] in at else "run"
    return [
        call["node_id"],
        at.get(call["parent_id"], -1),
        KINDS.index(kind),
        call["name"],
        call["model"],
        STATUSES.index(call["status"]),
        round(call["offset_ms"], 4),
        round(call["duration_ms"], 4),
        call["cost_usd"],
        call["tokens_in"],
        call["tokens_out"],
        call["stop_reason"],
        call["error_class"],
        call["retries_used"],
        call["iteration"],
        contexts.number(call["context"]),
        call["metadata"] or 0,
    ]


def _event_row(
    event: Mapping[str, Any], at: Mapping[str, int], start_ms: int, contexts: _Table, kinds: _Table
) -> list[Any]:
    call = at.get(event.get("node_id") or event["parent_id"] or "", -1)
    hidden: frozenset[str] = OF_EVERY_EVENT | (TOLD_BY_CALLS if event["kind"].startswith("call_") else frozenset())
    told = {name: value for name, value in event.items() if name not in hidden and value not in (None, "", 0, {}, [])}
    text = ", ".join(f"{name}: {_plain(value)}" for name, value in told.items())
    kind, context = kinds.number(event["kind"]), contexts.number(event["source"])
    return [event["seq"], event["at_ms"] - start_ms, kind, context, call, text[:MAX_EVENT_TEXT]]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


BODY = """\
<a class="skip" href="#view">Skip to the calls</a>
<header>
<h1><span id="mark" aria-hidden="true"></span> <span id="name"></span> <span id="ending" class="pill"></span></h1>
<p id="why"></p>
<dl id="figures"></dl>
<div id="meters" aria-label="Limits"></div>
</header>
<noscript><p class="note">This page shows its data with a script of its own, and scripts are off.</p></noscript>
<nav role="tablist" aria-label="Views">
<button role="tab" id="tab-tree" aria-controls="view">Calls</button>
<button role="tab" id="tab-time" aria-controls="view">Timeline</button>
<button role="tab" id="tab-cost" aria-controls="view">Cost</button>
<button role="tab" id="tab-events" aria-controls="view">Events</button>
<label class="grow"><span class="sr">Filter</span>
<input id="filter" type="search" placeholder="Filter ( / )" autocomplete="off" spellcheck="false"></label>
<span id="found" role="status"></span>
<button id="open">Expand all</button><button id="close">Collapse all</button>
<button id="theme" aria-label="Light or dark">◐</button>
</nav>
<main>
<section id="view" role="tabpanel">
<div id="list" tabindex="0"><div id="rows"></div></div>
<div id="flame" hidden><canvas id="canvas" tabindex="0" role="img"></canvas><div id="tip" hidden></div></div>
</section>
<aside id="detail" aria-label="Selected call" aria-live="polite"><p class="note">Select a call to see all of it.</p>
</aside>
</main>
<footer><p id="foot"></p></footer>
"""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#59636e;--line:#d9dee3;--soft:#f4f6f8;--pick:#dbe9ff;
--ok:#137333;--bad:#b3261e;--halt:#9a5200;--busy:#1a56b0;--llm:#5b6ee1;--tool:#1f8a70;--step:#7b8794;--agent:#9b5fb5;
--run:#4a5560;--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
:root[data-theme=dark]{color-scheme:dark;--bg:#111418;--fg:#e4e8ec;--dim:#9aa5b1;--line:#2c333b;--soft:#1a1f25;
--pick:#23395d;--ok:#5bc77c;--bad:#ff7b72;--halt:#f0a940;--busy:#79aef5;--llm:#8793f0;--tool:#3fb895;--step:#8a96a3;
--agent:#c08ad6;--run:#a3adb8}
:root[data-theme=light]{color-scheme:light}
*{box-sizing:border-box}
html,body{height:100%}
body{margin:0;display:flex;flex-direction:column;background:var(--bg);color:var(--fg);
font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header{padding:14px 18px 10px;border-bottom:1px solid var(--line)}
h1{font-size:19px;margin:0;display:flex;gap:8px;align-items:center;overflow-wrap:anywhere}
.pill{font-size:12px;font-weight:600;border:1px solid currentColor;border-radius:99px;padding:1px 9px;
white-space:nowrap}
#why{margin:4px 0 0;color:var(--dim);overflow-wrap:anywhere}#why:empty{display:none}
dl#figures{display:flex;flex-wrap:wrap;gap:4px 26px;margin:10px 0 0}
#figures div{display:flex;flex-direction:column}#figures dt{color:var(--dim);font-size:12px}
#figures dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
#meters{display:flex;flex-wrap:wrap;gap:10px;margin-top:12px;max-height:150px;overflow:auto}#meters:empty{display:none}
.meter{flex:0 1 215px;border:1px solid var(--line);border-radius:7px;padding:6px 9px;background:var(--soft)}
.meter b,.meter span{display:flex;justify-content:space-between;gap:8px;font-variant-numeric:tabular-nums}
.meter b{font-size:12px;color:var(--dim);font-weight:500;white-space:nowrap}
.meter b span+span{display:block;overflow:hidden;text-overflow:ellipsis}
.bar{height:6px;border-radius:3px;background:var(--line);margin-top:4px;overflow:hidden;display:flex}
.bar i{background:var(--ok);height:100%}.bar u{background:var(--ok);opacity:.4;height:100%}
.near .bar i{background:var(--halt)}
.tripped{border-color:var(--bad)}.tripped b,.tripped span{color:var(--bad)}.tripped .bar i{background:var(--bad)}
nav{display:flex;gap:6px;align-items:center;padding:8px 18px;border-bottom:1px solid var(--line);flex-wrap:wrap}
button,input{font:inherit;color:inherit;background:var(--bg);border:1px solid var(--line);border-radius:6px;
padding:4px 10px}
button{cursor:pointer}button:hover{background:var(--soft)}
[role=tab][aria-selected=true]{background:var(--fg);color:var(--bg);border-color:var(--fg)}
:focus-visible{outline:2px solid var(--busy);outline-offset:1px}
.grow{flex:1 1 160px}.grow input{width:100%}#found{color:var(--dim);font-size:12px;min-width:80px;text-align:right}
main{flex:1;min-height:240px;display:flex;overflow:hidden}
#view{flex:1;min-width:0;position:relative}
#list{position:absolute;inset:0;overflow:auto;contain:strict}#rows{position:relative}
.row{position:absolute;left:0;right:0;height:26px;display:flex;align-items:center;gap:8px;padding:0 12px;
border-bottom:1px solid var(--soft);white-space:nowrap;cursor:default}
.row:hover{background:var(--soft)}.row[aria-selected=true]{background:var(--pick)}
.what{flex:0 0 46%;min-width:0;display:flex;align-items:center;gap:6px;overflow:hidden}
.twist{flex:none;width:16px;text-align:center;color:var(--dim);cursor:pointer}
.label{overflow:hidden;text-overflow:ellipsis}.model,.dim{color:var(--dim)}.model{font-size:12px}
.why{overflow:hidden;text-overflow:ellipsis;font-size:12px}
.num{flex:0 0 84px;text-align:right;font-variant-numeric:tabular-nums}
.track{flex:1;min-width:60px;height:12px;position:relative;background:var(--soft);border-radius:3px}
.track i{position:absolute;top:1px;bottom:1px;min-width:2px;border-radius:2px}
.dot{flex:none;width:8px;height:8px;border-radius:2px}
.llm{background:var(--llm)}.tool{background:var(--tool)}.step{background:var(--step)}.agent{background:var(--agent)}
.run{background:var(--run)}
.success{color:var(--ok)}.fail{color:var(--bad)}.halt{color:var(--halt)}.running,.created{color:var(--busy)}
.seq{flex:0 0 64px;text-align:right;color:var(--dim);font-variant-numeric:tabular-nums}
.kind{flex:0 0 150px;overflow:hidden;text-overflow:ellipsis}.where{flex:0 1 190px;overflow:hidden;
text-overflow:ellipsis;color:var(--dim)}.text{flex:1;overflow:hidden;text-overflow:ellipsis}
.alarm{color:var(--bad)}
aside{flex:0 0 330px;border-left:1px solid var(--line);padding:12px 16px;overflow:auto}
aside h2{font-size:15px;margin:0 0 8px;overflow-wrap:anywhere}aside dl{margin:0}
aside dt{color:var(--dim);font-size:12px;margin-top:7px}aside dd{margin:0;overflow-wrap:anywhere;white-space:pre-wrap}
aside dd.mono{font:12px/1.5 var(--mono)}
.note{color:var(--dim)}noscript .note{padding:0 18px}
#flame{position:absolute;inset:0;overflow:auto}#canvas{display:block}
#tip{position:absolute;pointer-events:none;background:var(--fg);color:var(--bg);padding:4px 8px;border-radius:5px;
font-size:12px;max-width:420px;overflow-wrap:anywhere;z-index:2}
footer{border-top:1px solid var(--line);padding:5px 18px;color:var(--dim);font-size:12px}footer p{margin:0}
[hidden]{display:none!important}
.sr,.skip:not(:focus){position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
@media (max-width:900px){aside{display:none}.what{flex-basis:60%}.track{display:none}}
@media (prefers-color-scheme:dark){:root:not([data-theme=light]){--bg:#111418;--fg:#e4e8ec;--dim:#9aa5b1;
--line:#2c333b;--soft:#1a1f25;--pick:#23395d;--ok:#5bc77c;--bad:#ff7b72;--halt:#f0a940;--busy:#79aef5;--llm:#8793f0;
--tool:#3fb895;--step:#8a96a3;--agent:#c08ad6;--run:#a3adb8}}
@media print{body{height:auto}}
"""

SCRIPT = r"""
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
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
};
const usd = x => "$" + (x === 0 ? "0.00" : x.toFixed(Math.max(2, Math.min(9, 3 - Math.floor(Math.log10(x)))))
  .replace(/(\.\d\d+?)0+$/, "$1"));
const ms = x => x < 1 ? (x * 1000).toFixed(0) + " µs" : x < 1000 ? x.toFixed(1) + " ms" : x < 60000 ?
  (x / 1000).toFixed(2) + " s" : Math.floor(x / 60000) + " min " + (x % 60000 / 1000).toFixed(0) + " s";
const amount = (unit, x) => unit === "usd" ? usd(x) : unit === "seconds" ? ms(x * 1000) : Math.round(x)
  .toLocaleString("en");

function summary() {
  const status = STATUS.indexOf(A.status), S = A.stats;
  $("mark").textContent = MARK[status]; $("mark").className = A.status;
  $("name").textContent = A.name || "run";
  $("ending").textContent = A.termination_reason || A.status; $("ending").classList.add(A.status);
  $("why").textContent = [A.error_class, A.stop_reason].filter(Boolean).join(": ");
  const figures = [["cost", usd(S.total_cost)], ["took", ms(A.duration_ms)],
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
  const cost = el("span", "num", c.total ? usd(c.total) : ""); if (c.below.length) cost.classList.add("dim");
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

let asked = 0;
function paint() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 8);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 8);
  const made = document.createDocumentFragment();
  for (let at = first; at < last; at++) {
    const row = view === "events" ? eventRow(shown[at]) : callRow(shown[at], at);
    row.id = "row" + at; row.style.top = at * ROW + "px";
    row.setAttribute("aria-selected", at === picked);
    row.setAttribute("aria-setsize", shown.length); row.setAttribute("aria-posinset", at + 1);
    row.addEventListener("click", () => pick(at));
    made.append(row);
  }
  rowsBox.replaceChildren(made);
  list.setAttribute("aria-activedescendant", "row" + picked);
}
const later = () => { if (!asked) asked = requestAnimationFrame(() => { asked = 0; paint(); }); };
function refresh() {
  shown = view === "events" ? visibleEvents() : visibleCalls();
  picked = Math.max(0, Math.min(picked, shown.length - 1));
  // Browsers give up on boxes of tens of millions of pixels; 50,000 rows are far from that.
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
  if (event) { add("event", D.kinds[event[2]]); add("seq", event[0]); add("said", event[5]); }
  if (c) {
    const status = el("dd", STATUS[c.status], MARK[c.status] + " " + STATUS[c.status]);
    fields.append(el("dt", "", "status"), status);
    add("error", c.error); add("reason", c.why); add("model", c.model);
    add("cost", c.cost ? usd(c.cost) : ""); add("cost with everything below", c.below.length ? usd(c.total) : "");
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
    for (const one of c.below) if (one.total) { stack.push([one, next, lane + 1]); next += one.total / all; }
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
    " calls; the Calls view has the same as a list");
  if (!all.length) { g.fillStyle = color("dim"); g.fillText("Nothing here has a cost.", 8, 40); }
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
"""
