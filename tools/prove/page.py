"""The page: a table of verdicts, and behind each cell its program and what was measured.

Made from the results and the programs alone: no verdict is written by hand, and running it twice gives the same page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.environments import ROOT
from tools.pages import write_part
from tools.prove.contestants import CONTESTANTS
from tools.prove.probes import PROBES, Facts, Kind, Verdict, verdict
from tools.prove.results import Cell, Results
from tools.prove.sources import Sources, sources

RESULTS = Path(__file__).parent / "results.json"
HTML = ROOT / "docs" / "proof.html"
TABLE = ROOT / "docs" / "comparison.md"
SIGNS = {Kind.HOLDS: "✓", Kind.FAILS: "✗", Kind.NOT_APPLICABLE: "–", Kind.ERROR: "!"}


@dataclass(frozen=True, slots=True)
class Shown:
    """One cell of the page."""

    contestant: str
    probe: str
    verdict: Verdict
    cell: Cell | None = None


def read_cells(results: Results) -> dict[tuple[str, str], Shown]:
    """Judge every cell of the table, those that were never run included."""
    read = {name: sources(name) for name in CONTESTANTS}
    return {
        (one, other): _shown(one, other, read[one], results.get((one, other)))
        for one in CONTESTANTS
        for other in PROBES
    }


def _shown(contestant: str, probe: str, found: Sources, cell: Cell | None) -> Shown:
    if probe in found.not_applicable:
        return Shown(contestant, probe, Verdict(Kind.NOT_APPLICABLE, found.not_applicable[probe]))
    if probe not in found.programs:
        return Shown(contestant, probe, Verdict(Kind.ERROR, "there is no program"))
    if cell is None:
        return Shown(contestant, probe, Verdict(Kind.ERROR, "not run"))
    if cell.fingerprint != found.fingerprint(probe):
        return Shown(contestant, probe, Verdict(Kind.ERROR, "the program has changed and was not run again"))
    return Shown(contestant, probe, verdict(PROBES[probe], cell.facts), cell)


def write_pages(cells: Mapping[tuple[str, str], Shown]) -> None:
    """Write the HTML page, and the table of the documentation."""
    HTML.write_text(page(cells), "utf-8")
    write_part(TABLE, "prove", table(cells))


def table(cells: Mapping[tuple[str, str], Shown]) -> str:
    """Return the verdicts as a Markdown table, one row per probe."""
    rows = [["", *(f"{CONTESTANTS[name].title} {_version(cells, name)}".strip() for name in CONTESTANTS)]]
    rows.append(["---"] * len(rows[0]))
    for probe in PROBES.values():
        cell = [_words(cells[name, probe.name]) for name in CONTESTANTS]
        rows.append([f"**{probe.title}**", *cell])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{dates(cells)}"


def _words(shown: Shown) -> str:
    if shown.verdict.kind is Kind.NOT_APPLICABLE:
        return "–"
    return f"{SIGNS[shown.verdict.kind]} {shown.verdict.text}"


def dates(cells: Mapping[tuple[str, str], Shown]) -> str:
    """Return when the cells were run, and on what."""
    days = sorted({shown.cell.date for shown in cells.values() if shown.cell})
    pythons = sorted({str(report["python"]) for shown in cells.values() for report in _facts(shown).all("version")})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else "never"
    return f"Run on {when} with Python {', '.join(pythons)}."


def _facts(shown: Shown) -> Facts:
    return shown.cell.facts if shown.cell else Facts()


def _version(cells: Mapping[tuple[str, str], Shown], name: str) -> str:
    found = {str(report["version"]) for probe in PROBES for report in _facts(cells[name, probe]).all("version")}
    return ", ".join(sorted(found))


def page(cells: Mapping[tuple[str, str], Shown]) -> str:
    """Return the whole page: one file without scripts, fonts or pictures."""
    head = "".join(
        f"<th>{escape(one.title)}<br><small>{escape(_version(cells, name))}</small></th>"
        for name, one in CONTESTANTS.items()
    )
    rows = "".join(
        f"<tr><th>{escape(probe.title)}</th>"
        + "".join(_cell(cells[name, probe.name]) for name in CONTESTANTS)
        + "</tr>"
        for probe in PROBES.values()
    )
    limits = "".join(
        f"<li><b>{escape(one.title)}</b>: {_code(one.limit)}. Installed: {escape(', '.join(one.packages))}</li>"
        for one in CONTESTANTS.values()
    )
    sections = "".join(_section(probe, cells) for probe in PROBES)
    shared = "".join(
        f'<details id="shared-{name}"><summary>{escape(one.title)}</summary><pre>{escape(sources(name).shared)}</pre>'
        "</details>"
        for name, one in CONTESTANTS.items()
    )
    return TEMPLATE.format(
        dates=escape(dates(cells)), counts=_counts(cells), head=head, rows=rows, limits=limits, sections=sections,
        shared=shared,
    )  # fmt: skip


def _counts(cells: Mapping[tuple[str, str], Shown]) -> str:
    lines = []
    for name, one in CONTESTANTS.items():
        found = Counter(cells[name, probe].verdict.kind for probe in PROBES)
        lines.append(f"{one.title}: " + ", ".join(f"{found[kind]} {kind}" for kind in Kind if found[kind]))
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _cell(shown: Shown) -> str:
    kind = shown.verdict.kind
    text = "not applicable" if kind is Kind.NOT_APPLICABLE else shown.verdict.text
    link = f"#{shown.contestant}-{shown.probe}"
    return f'<td class="{kind.name.lower()}"><a href="{link}">{SIGNS[kind]} {escape(text)}</a></td>'


def _section(probe: str, cells: Mapping[tuple[str, str], Shown]) -> str:
    asked = PROBES[probe]
    parts = [_program(cells[name, probe]) for name in CONTESTANTS]
    return f'<h2 id="{probe}">{escape(asked.title)}</h2><p>{escape(asked.task)}</p>{"".join(parts)}'


def _program(shown: Shown) -> str:
    name, probe, found = CONTESTANTS[shown.contestant].title, shown.probe, shown.verdict
    head = f'<h3 id="{shown.contestant}-{probe}" class="{found.kind.name.lower()}">'
    head += f"{escape(name)}: {SIGNS[found.kind]} {escape(found.kind)}</h3><p>{escape(found.text)}.</p>"
    program = sources(shown.contestant).programs.get(probe)
    if program is None or found.kind is Kind.NOT_APPLICABLE:
        return head
    measured = "\n".join(_measured(shown)) or "nothing was measured"
    return (
        f'{head}<div class="pair"><pre>{escape(program)}</pre><pre>{escape(measured)}</pre></div>'
        f"<p>Again: <code>make prove CELLS={shown.contestant}:{probe}</code> · "
        f'<a href="#shared-{shown.contestant}">what its programs share</a></p>'
    )


def _measured(shown: Shown) -> list[str]:
    facts = _facts(shown)
    lines = [f"run on        {shown.cell.date}"] if shown.cell else []
    lines.append(f"invoice       ${facts.invoice_usd:.2f} for {len(facts.requests)} requests")
    if facts.requests:
        lines.append(f"last request  {max(float(request['at']) for request in facts.requests):.1f} s")
    lines += [f"disconnected  {at:.1f} s" for at in facts.hung_up[:5]]
    seen: Counter[str] = Counter()
    for report in facts.reports:
        kind = str(report["kind"])
        seen[kind] += 1
        if seen[kind] <= 12 and kind != "version":
            more = " ".join(str(value) for key, value in report.items() if key not in ("kind", "at", "attempt"))
            lines.append(f"{float(report['at']):5.1f} s  {kind} {more}".rstrip())
    return lines


def _code(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if at % 2 else piece for at, piece in enumerate(pieces))


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Penstock beside its peers</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --good: light-dark(#1a7f37, #56c26f);
  --bad: light-dark(#b3261e, #ff8a80); --dim: light-dark(#666, #aaa) }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem }}
table {{ border-collapse: collapse; font-size: .85rem }}
th, td {{ border: 1px solid var(--line); padding: .4rem .5rem; text-align: left; vertical-align: top }}
td a {{ color: inherit; text-decoration: none }}
td a:hover {{ text-decoration: underline }}
.holds a, h3.holds {{ color: var(--good) }}
.fails a, h3.fails, .error a, h3.error {{ color: var(--bad) }}
.not_applicable a, h3.not_applicable {{ color: var(--dim) }}
.wide {{ overflow-x: auto }}
.pair {{ display: grid; grid-template-columns: 3fr 2fr; gap: 1rem }}
@media (max-width: 60rem) {{ .pair {{ grid-template-columns: 1fr }} }}
pre {{ border: 1px solid var(--line); font-size: .8rem; margin: 0; overflow-x: auto; padding: .6rem }}
</style>
</head>
<body>
<h1>Penstock beside its peers</h1>
<p>The same probes on every contestant. The judge is the invoice of a fake provider that runs outside of the program,
and the times of its requests; of what a contestant says about itself, only the events it emitted count. Each contestant
runs in an environment of its own, is used as its documentation recommends, and has its own limits switched on.
{dates}</p>
<p>✓ holds · ✗ does not hold · – the contestant has no such feature, or none without a further product · ! the cell
could not be run, which says nothing about the contestant. Each cell links to its program and to what was measured.</p>
<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>
<ul>{counts}</ul>
<h2>The limits that were on</h2>
<ul>{limits}</ul>
<h2>How to run it again</h2>
<p><code>make prove</code> runs every cell, <code>make prove CELLS=langgraph:budget</code> one,
<code>make prove "CELLS=agno :resume"</code> a contestant and a probe. Programs are in
<code>tools/prove/programs/</code>, what the model does and how a cell is judged in <code>tools/prove/probes.py</code>.
A cell whose program was changed and not run again is shown as an error.</p>
{sections}
<h2>What the programs of a contestant share</h2>
{shared}
</body>
</html>
"""
