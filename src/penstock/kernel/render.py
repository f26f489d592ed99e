"""Render graphs as Mermaid flowcharts and as text.

Ids and types are escaped and never interpreted as syntax. The same graph always gives the same text, and a graph that
cannot run can be rendered as well.
"""

from __future__ import annotations

from penstock.kernel.graph import DEFAULT_INPUT, DEFAULT_OUTPUT, Channel, EdgeSpec, GraphSpec

ARROWS: dict[Channel, str] = {"flow": "-->", "link": "-.->"}
TEXT_ARROWS: dict[Channel, str] = {"flow": "→", "link": "⇢"}
UNSAFE_IN_MERMAID = frozenset("\"#&'<>[]\\`{|}")


def to_mermaid(graph: GraphSpec) -> str:
    """Return the graph as a Mermaid flowchart: flow edges solid, links dashed, handles named unless they are the
    default ones.
    """
    numbers: dict[str, int] = {}
    lines = ["flowchart LR"]
    for node in graph.nodes:
        number = numbers.setdefault(node.id, len(numbers))
        lines.append(f'    n{number}["{_escaped(node.id)}<br/>{_escaped(node.type)}"]')
    for end in [end for edge in graph.edges for end in (edge.source, edge.target)]:
        if end not in numbers:
            numbers[end] = len(numbers)
            lines.append(f'    n{numbers[end]}["{_escaped(end)}<br/>(no such node)"]')
    for edge in graph.edges:
        label = _label(edge)
        arrow = ARROWS.get(edge.channel, "--x") + (f'|"{_escaped(label)}"|' if label else "")
        lines.append(f"    n{numbers[edge.source]} {arrow} n{numbers[edge.target]}")
    return "\n".join(lines) + "\n"


def to_text(graph: GraphSpec) -> str:
    """Return the graph as lines: each node with its type, and below it its outgoing edges; links are dotted arrows."""
    leaving: dict[str, list[EdgeSpec]] = {}
    for edge in graph.edges:
        leaving.setdefault(edge.source, []).append(edge)
    lines = [f"{_visible(graph.id)}: {_count(len(graph.nodes), 'node')}, {_count(len(graph.edges), 'edge')}"]
    for node in graph.nodes:
        lines.append(f"  {_visible(node.id)} ({_visible(node.type)})")
        lines += [_leaving_line(edge) for edge in leaving.pop(node.id, ())]
    for source, edges in leaving.items():
        lines.append(f"  {_visible(source)} (no such node)")
        lines += [_leaving_line(edge) for edge in edges]
    return "\n".join(lines) + "\n"


def _leaving_line(edge: EdgeSpec) -> str:
    arrow = TEXT_ARROWS.get(edge.channel, "?")
    return f"    {_visible(edge.source_handle)} {arrow} {_visible(edge.target)}.{_visible(edge.target_handle)}"


def _label(edge: EdgeSpec) -> str:
    if (edge.source_handle, edge.target_handle) == (DEFAULT_OUTPUT, DEFAULT_INPUT):
        return ""
    return f"{edge.source_handle} → {edge.target_handle}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _visible(text: str) -> str:
    """Return `text` on one line, with characters that cannot be printed as escapes."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _escaped(text: str) -> str:
    """Return `text` for a Mermaid label, with characters that could end the label or be markup as entity codes."""
    return "".join(f"#{ord(one)};" if one in UNSAFE_IN_MERMAID else one for one in _visible(text))
