"""Every behaviour Penstock owes, by id, and whether it is built.

A test says which ids it proves with `@pytest.mark.requirement("G-1", "C-2")`. Both directions are checked: an id that
is built has a passing test, a mark names an id that is built. `python -m tests.requirements` counts them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Requirement:
    """One behaviour, and the reason why it is missing if it is."""

    behaviour: str
    deferred: str | None = None


GROUPS: Mapping[str, str] = {
    "G": "execution graph",
    "C": "containment",
    "P": "policies, budgets, cancellation, graphs",
    "T": "one context, traces, agent loops",
    "K": "graph kernel and chat",
    "X": "beyond",
}

REQUIREMENTS: dict[str, Requirement] = {
    # the execution graph
    "G-1": Requirement("Node ids come from one counter, are never reused, and keep their order past n999999."),
    "G-2": Requirement("There is exactly one root, running, at depth 0; a second create_root raises RuntimeError."),
    "G-3": Requirement("An unknown parent raises KeyError; depth is the parent's plus one, and max_depth follows."),
    "G-4": Requirement("A node moves only along the lifecycle table; terminal is final; every mark counts once."),
    "G-5": Requirement("A node has all 15 fields; a failed or halted one may carry cost and tokens too."),
    "G-6": Requirement("Totals are kept as nodes end, with failed and halted work visible in fields of its own."),
    "G-7": Requirement("Costs never go down, and a retry is counted once, when its node ends."),
    "G-8": Requirement("A snapshot is JSON, independent of later changes, true for one seq, and hardly stops writers."),
    "G-9": Requirement("Under 64 concurrent writers ids stay unique and totals exact."),
    "G-10": Requirement("A call's parent is the call that made it, also under concurrency."),
    "G-11": Requirement("A cap on kept nodes folds the oldest finished sub-trees into their parent's totals."),
    "G-12": Requirement("Repetition, A-B-A-B, spend rate and token rate each give one advisory event, or a halt."),
    # chain-level containment
    "C-1": Requirement("ExecutionConfig refuses nonsense naming the field; 0 halts the first call; timeout 0 is none."),
    "C-2": Requirement("Spent plus held never passes the cost ceiling, and refused calls never run."),
    "C-3": Requirement("Step limit and retry budget are atomic: five steps and fifty threads make five runs."),
    "C-4": Requirement("Timeout and abort reach running work: async is cancelled, sync abandoned; new calls halt."),
    "C-5": Requirement("Checks run in the stated order, and one that refuses consults nothing after it."),
    "C-6": Requirement("wrap_llm_call and wrap_tool_call return a Decision; value and async twins exist."),
    "C-7": Requirement("WrapOptions' name, cost hint, per-call timeout and retry override all work."),
    "C-8": Requirement("Shield hooks in five slots deny with a reason, degrade, or abstain; a raising hook denies."),
    "C-9": Requirement("BudgetWindowHook slides: a refused caller recovers when the window has passed."),
    "C-10": Requirement("CircuitBreaker allows exactly its number of probes under 1,000 callers, and is shareable."),
    "C-11": Requirement("All eight stops are emitted with limit, budget and amount, each as a SafetyEvent."),
    "C-12": Requirement("get_snapshot works any time, with calls in flight and the partial results of a forced stop."),
    "C-13": Requirement("record_event and the combined event log are bounded and count what was dropped."),
    "C-14": Requirement("A clean exit is not an abort; KeyboardInterrupt and SystemExit are never swallowed."),
    "C-15": Requirement("ChainMetadata reaches hooks, events, traces and exports."),
    "C-16": Requirement("Everything works with no pipeline and no configuration beyond limits."),
    "C-17": Requirement("Output that a stopped stream had yielded is kept in the partial results of the stop."),
    "C-18": Requirement("After a stop, wrap_* returns HALT outside the with block too; RunEnded is for normal ends."),
    "C-19": Requirement("A pipeline has its events of wrapped and direct hook calls, and so has the run's log."),
    "C-20": Requirement("A per-call timeout_ms overrides the configured one within the run's remaining time."),
    # policies
    "P-E1": Requirement("ErrorPolicy fails, retries, skips or falls back; contradictory fields are refused."),
    "P-E2": Requirement("Retry sleeps can be interrupted; attempts are traced and drawn from one budget."),
    "P-E3": Requirement("Fallback nodes run under the same budget, timeout, trace and cancellation."),
    "P-E4": Requirement("No policy retries, skips or replaces a cancellation or an exceeded budget."),
    "P-E5": Requirement("Nodes of JSON graphs take the error policy, timeout and budget that Python steps take."),
    "P-E6": Requirement("An ordinary exception of a step carries the results that had finished."),
    # budgets
    "P-B1": Requirement("Budget limits tokens, time, steps, api calls and cost; None is no limit, 0 is nothing."),
    "P-B2": Requirement("The runtime counts usage from what calls report, so that each limit can really trip."),
    "P-B3": Requirement("BudgetExceededError carries usage, budget, reason, whose budget, and partial results."),
    "P-B4": Requirement("Nested work shares the pool; a sub-budget and every ancestor hold before the work starts."),
    "P-B5": Requirement("Finishing exactly at a limit is fine; starting anything after it is not."),
    "P-B6": Requirement("A context starts from a given ResourceUsage, which measures time and can be added to."),
    "P-B7": Requirement("ctx.upstream is a real dict, and a step that returns it does not contain itself."),
    "P-B8": Requirement("A sub-budget of one step allows the one step it is attached to."),
    # cancellation
    "P-C1": Requirement("CancellationToken is safe across threads and loops and wakes its waiters at once."),
    "P-C2": Requirement("Cancellation is checked around every step and during every wait."),
    # observation
    "P-O1": Requirement("ExecutionTrace explains itself: parents, attempts, fallbacks, status, totals."),
    "P-O2": Requirement("Tracing is opt-in and costs under 5 % on 100 steps."),
    "P-O3": Requirement("An opt-in JSONL audit log per node can be joined by node id and time."),
    "P-O4": Requirement("Traces and steps can be constructed, changed and read back as plain dataclasses."),
    # parallel work
    "P-P1": Requirement("max_parallel holds over the whole nest; a step starts when its inputs are ready."),
    "P-P2": Requirement("Persistent nodes exclude each other, queue without deadlock, and time out."),
    "P-P3": Requirement("When a step fails its siblings follow the settle policy; nothing is orphaned."),
    # code-first graphs
    "P-G1": Requirement("Graph, Step, FunctionNode and Session work as written; a Graph is a Node."),
    "P-G2": Requirement("Every scenario of the original's table holds."),
    # one context through everything
    "T-1": Requirement("One ExecutionContext flows through model, tools, formats, hooks, loop and graph nodes."),
    "T-2": Requirement("Well-known and custom events are JSON, with time, iteration and depth filled in."),
    "T-3": Requirement("Stats keep themselves, by model and tool; children count into every ancestor, exactly."),
    "T-4": Requirement("Children spawn and complete once, at any depth; one stopped by its parent's limit says so."),
    "T-5": Requirement("Executor hooks change, abort or spawn; AfterExecution always fires with the reason."),
    "T-6": Requirement("The agent loop is open to the user's own; ReAct and tool calling are included."),
    "T-7": Requirement("Compaction is a nested agent, by threshold, with the full history kept."),
    "T-8": Requirement("Models and tool chains trace themselves; failed calls are traced with their cost."),
    "T-9": Requirement("Text output formats validate, with errors a model can act on and bounded retries."),
    "T-10": Requirement("Deltas stream with their source path; a stream without its end marker is truncated."),
    "T-11": Requirement("The trace tree prints, and exports to JSON, Mermaid and OpenTelemetry."),
    "T-12": Requirement("Tool arguments, results and messages are recorded on request, redacted and bounded."),
    "T-13": Requirement("A context has its result, error, reason and times; a raising hook has a reason of its own."),
    # the graph kernel
    "K-1": Requirement("The kernel knows nodes, edges and routing, and no domain word."),
    "K-2": Requirement("Every edge states its channel, flow or link; nothing is inferred."),
    "K-3": Requirement("The runtime API resolves nodes, edges and links, materializes and caches."),
    "K-4": Requirement("Executors return or stream, are registered by type, and may come from third parties."),
    "K-5": Requirement("A link materializes once per run; a real cycle names its path."),
    "K-6": Requirement("Only what the entry nodes reach runs; a cycle inside names its path."),
    "K-7": Requirement("Branches without live input are skipped; many edges into a handle have a meaning."),
    "K-8": Requirement("Values are typed and conversions declared; a failed one is a node error."),
    "K-9": Requirement("Every executed node has one started and one terminal event in every interleaving."),
    # chat
    "K-10": Requirement("All five chat entry points run one path."),
    "K-11": Requirement("Who is the entry agent follows from topology, through intermediate nodes."),
    "K-12": Requirement("Pipeline and composition live in one graph."),
    "K-13": Requirement("Cancel works before, during and after a run, twice, and across a restart."),
    "K-14": Requirement("An abandoned stream leaves nothing running unless it is to go on."),
    "K-15": Requirement("Messages form a tree: retry and edit add siblings, nothing is deleted."),
    "K-16": Requirement("The node library has every listed node type."),
    "K-17": Requirement("Scope rules see into subgraphs, loops and maps: the first agent inside is an entry agent."),
    "K-18": Requirement("The published OpenAPI describes graph documents, channels included."),
    "K-19": Requirement("The editor always writes the channel of an edge and never patches one."),
    # beyond
    "X-1": Requirement("The worst case is held at every level at once; unknown outcomes stay held; output is clamped."),
    "X-2": Requirement("An unknown price is refused, assumed or counted as unknown, and reports say so."),
    "X-3": Requirement("A person grants more to a halted run and it goes on; a replay charges nothing twice."),
    "X-4": Requirement("The same run code is durable and spreads over machines."),
    "X-5": Requirement("Ten lines contain an existing program."),
    "X-6": Requirement("A graph is served as an OpenAI model, as MCP tools, and over REST and resumable SSE."),
    "X-7": Requirement("Approvals pause, survive a restart, and can be cancelled while waiting."),
    "X-8": Requirement("Every reliability invariant holds."),
    "X-9": Requirement("Admission waits for holds of others instead of refusing."),
    "X-10": Requirement("A person lists and resolves unresolved bills."),
    "X-11": Requirement("Nothing in a contained process spends silently."),
    "X-12": Requirement("One command contains any program in any language."),
    "X-13": Requirement("Python graphs and agents are served as they are."),
    "X-14": Requirement("The OpenAI endpoint passes client tools and settings, or refuses them by name."),
    "X-15": Requirement("Operators have logs, tokens, metrics and a model allow-list."),
    "X-16": Requirement("The documentation is a searchable site; every snippet runs."),
    "X-17": Requirement("`make prove` runs the same probes on every peer."),
    "X-18": Requirement("A web UI works offline from the wheel: runs, budgets, bills, chat, approvals, editor."),
    "X-19": Requirement("A person's data is found, exported and erased; neighbours upgrade."),
}


def marks_in(source: str) -> Iterator[str]:
    """The ids that the `pytest.mark.requirement(...)` calls of one file name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.requirement":
            yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def unknown(ids: Iterable[str]) -> list[str]:
    """The ids that no requirement has."""
    return sorted(set(ids) - REQUIREMENTS.keys())


def built_but_deferred(ids: Iterable[str]) -> list[str]:
    """The ids that are marked by a test and still listed as deferred."""
    return sorted(i for i in set(ids) & REQUIREMENTS.keys() if REQUIREMENTS[i].deferred)


def untested(ids: Iterable[str]) -> list[str]:
    """The ids that are listed as built and marked by no test."""
    marked = set(ids)
    return [i for i in REQUIREMENTS if REQUIREMENTS[i].deferred is None and i not in marked]


def unproven(passes: Mapping[str, bool]) -> list[str]:
    """The ids none of whose tests passed; `passes` says for each marked id whether one did."""
    return sorted(i for i, passed in passes.items() if not passed)


def table(marked: Iterable[str]) -> str:
    """Done, deferred and total per group; done is built and marked by a test."""
    missing = untested(marked)
    done, deferred, total = Counter[str](), Counter[str](), Counter[str]()
    for id_, requirement in REQUIREMENTS.items():
        group = id_.partition("-")[0]
        total[group] += 1
        deferred[group] += requirement.deferred is not None
        done[group] += requirement.deferred is None and id_ not in missing
    rows = [(f"{g}  {name}", done[g], deferred[g], total[g]) for g, name in GROUPS.items()]
    rows.append(("all", done.total(), deferred.total(), total.total()))
    lines = [f"{'':44}{'done':>6}{'deferred':>10}{'total':>7}"]
    lines += [f"{name:44}{a:6}{b:10}{c:7}" for name, a, b, c in rows]
    lines += [f"no test yet: {', '.join(missing)}"] if missing else []
    return "\n".join(lines)


if __name__ == "__main__":
    files = Path(__file__).parent.rglob("test_*.py")
    print(table(i for file in files for i in marks_in(file.read_text())))
