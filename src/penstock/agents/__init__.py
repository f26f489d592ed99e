"""Agents: models, tools, loops, and an agent that combines them.

messages      messages and tool calls          hooks         observing and changing an execution
model         models, as agents see them       executor      running a loop to its end
tools         functions a model may call       formats       answers that programs can read
loop          one iteration at a time          compaction    shortening a conversation
tool_calling, react                            agent         all of it combined
execution     the execution under way          schema        JSON Schema of tools and answers
embedding     models that make vectors        history       the conversation before a graph's input
"""

from penstock.agents.agent import Agent, AgentResult
from penstock.agents.compaction import Compaction
from penstock.agents.embedding import BadEmbeddings, EmbeddingModel, EmbeddingRequest, Embeddings
from penstock.agents.executor import Executor, MaxIterationsReached
from penstock.agents.formats import (
    FormatError,
    JsonFormat,
    MarkdownFormat,
    ReActFormat,
    TextOutputFormat,
    XmlFormat,
)
from penstock.agents.history import chat_history
from penstock.agents.hooks import (
    AfterExecutionEvent,
    AfterIterationEvent,
    BeforeExecutionEvent,
    BeforeIterationEvent,
    Hook,
    HookEvent,
)
from penstock.agents.loop import (
    AgentLoop,
    AgentLoopResult,
    Approval,
    Conversation,
    ExecutorResult,
    HookAbort,
    Iteration,
    LoopAction,
    LoopData,
    data_of,
    remember,
    transcript_of,
)
from penstock.agents.messages import Media, Message, TextDelta, ToolCall, ToolCallDelta, ToolResult, Transcript
from penstock.agents.model import (
    Model,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    NamedTool,
    TruncatedByBudget,
    TruncatedResponse,
)
from penstock.agents.react import ReActLoop
from penstock.agents.scripted import ScriptedModel, ScriptEnded
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import Tool, ToolChain, Tools, ToolSpec, tool

__all__ = [
    "AfterExecutionEvent",
    "AfterIterationEvent",
    "Agent",
    "AgentLoop",
    "AgentLoopResult",
    "AgentResult",
    "Approval",
    "BadEmbeddings",
    "BeforeExecutionEvent",
    "BeforeIterationEvent",
    "Compaction",
    "Conversation",
    "EmbeddingModel",
    "EmbeddingRequest",
    "Embeddings",
    "Executor",
    "ExecutorResult",
    "FormatError",
    "Hook",
    "HookAbort",
    "HookEvent",
    "Iteration",
    "JsonFormat",
    "LoopAction",
    "LoopData",
    "MarkdownFormat",
    "MaxIterationsReached",
    "Media",
    "Message",
    "Model",
    "ModelRequest",
    "ModelResponse",
    "ModelSettings",
    "NamedTool",
    "ReActFormat",
    "ReActLoop",
    "ScriptEnded",
    "ScriptedModel",
    "TextDelta",
    "TextOutputFormat",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallingLoop",
    "ToolChain",
    "ToolResult",
    "ToolSpec",
    "Tools",
    "Transcript",
    "TruncatedByBudget",
    "TruncatedResponse",
    "XmlFormat",
    "chat_history",
    "data_of",
    "remember",
    "tool",
    "transcript_of",
]
