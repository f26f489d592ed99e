"""The node types that come with Penstock. Each is registered as an entry point under its type.

begin, end      input, chat-start, output, constant, text
models          agent, team, llm-completion, prompt-template, embedding
ways            conditional, merge
graphs inside   subgraph, map, loop
tools           tool, toolset, mcp-server
Python          program
the world       http-request, approval, memory

Names are imported on first use; pydantic, CEL and providers when a node first needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.nodes.approval import Answer as Answer
    from penstock.nodes.approval import ApprovalGone as ApprovalGone
    from penstock.nodes.approval import ApprovalRequest as ApprovalRequest
    from penstock.nodes.approval import Approvals as Approvals
    from penstock.nodes.memory import Memory as Memory
    from penstock.nodes.memory import MemoryStore as MemoryStore
    from penstock.nodes.program import Program as Program

NODE_TYPES: Mapping[str, str] = {
    "agent": "penstock.nodes.agent:AgentNode",
    "approval": "penstock.nodes.approval:ApprovalNode",
    "chat-start": "penstock.nodes.chat_start:ChatStart",
    "conditional": "penstock.nodes.conditional:Conditional",
    "constant": "penstock.nodes.constant:Constant",
    "embedding": "penstock.nodes.embedding:EmbeddingNode",
    "http-request": "penstock.nodes.http_request:HttpRequest",
    "input": "penstock.nodes.input:Input",
    "llm-completion": "penstock.nodes.llm_completion:LlmCompletion",
    "loop": "penstock.nodes.loop:Loop",
    "map": "penstock.nodes.map:Map",
    "mcp-server": "penstock.nodes.mcp_server:McpServer",
    "memory": "penstock.nodes.memory:MemoryNode",
    "merge": "penstock.nodes.merge:Merge",
    "output": "penstock.nodes.output:Output",
    "program": "penstock.nodes.program:ProgramNode",
    "prompt-template": "penstock.nodes.prompt_template:PromptTemplate",
    "subgraph": "penstock.nodes.subgraph:Subgraph",
    "team": "penstock.nodes.team:TeamNode",
    "text": "penstock.nodes.text:TextNode",
    "tool": "penstock.nodes.tool:ToolNode",
    "toolset": "penstock.nodes.toolset:Toolset",
}
"""Import path of each type; identical to the entry points of the package."""

__all__ = [
    "NODE_TYPES",
    "Answer",
    "ApprovalGone",
    "ApprovalRequest",
    "Approvals",
    "Memory",
    "MemoryStore",
    "Program",
    "executors",
    "json_schemas",
]

MODULES: Mapping[str, str] = {"Memory": "memory", "MemoryStore": "memory", "Program": "program"}
"""Modules of the names above; all others are in `approval`."""


def executors() -> dict[str, Any]:
    """Return an executor of every type, for a registry of your own."""
    return {node_type: _loaded(where)() for node_type, where in NODE_TYPES.items()}


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of the data of every type, including the options of nodes that run."""
    from penstock.runtime.graphs.document_schema import data_schema

    return {node_type: data_schema(executor) or {} for node_type, executor in executors().items()}


def _loaded(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _loaded(f"penstock.nodes.{MODULES.get(name, 'approval')}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
