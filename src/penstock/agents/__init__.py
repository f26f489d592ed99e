"""Agents: models, tools, loops and what holds them together.

messages      what is said                     hooks         who may look into an execution, and change it
model         models, as agents see them       executor      running a loop to its end
tools         functions a model may ask for    formats       answers that programs can read
loop          one iteration at a time          compaction    making a conversation shorter
tool_calling, react                            agent         all of it in one thing
"""

from penstock.agents.agent import Agent, AgentResult
from penstock.agents.compaction import Compaction
from penstock.agents.executor import Executor, ExecutorResult, MaxIterationsReached
from penstock.agents.formats import (
    FormatError,
    JsonFormat,
    MarkdownFormat,
    ReActFormat,
    TextOutputFormat,
    XmlFormat,
)
from penstock.agents.hooks import Approval, Hook, HookAbort
from penstock.agents.loop import (
    AgentLoop,
    AgentLoopResult,
    Conversation,
    Iteration,
    LoopAction,
    LoopData,
    data_of,
    remember,
    transcript_of,
)
from penstock.agents.messages import Media, Message, ToolCall, ToolResult, Transcript
from penstock.agents.model import (
    AnswerCut,
    Model,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    TextDelta,
    ToolCallDelta,
    TruncatedResponse,
)
from penstock.agents.react import ReActLoop
from penstock.agents.scripted import ScriptedModel, ScriptEnded
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import Tool, ToolChain, Tools, ToolSpec, tool

__all__ = [
    "Agent",
    "AgentLoop",
    "AgentLoopResult",
    "AgentResult",
    "AnswerCut",
    "Approval",
    "Compaction",
    "Conversation",
    "Executor",
    "ExecutorResult",
    "FormatError",
    "Hook",
    "HookAbort",
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
    "TruncatedResponse",
    "XmlFormat",
    "data_of",
    "remember",
    "tool",
    "transcript_of",
]
