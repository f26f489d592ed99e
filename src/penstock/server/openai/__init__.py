"""OpenAI-compatible API for graphs: each graph is a model.

router      the routes, and /v1/chat/completions              entry      which parameters a graph can apply
responses   /v1/responses                                     refusals   errors in OpenAI's format
runs        graphs as models, and the run of one in the       wire/      translation between formats, without I/O
            chat, or after the tool calls, that a request     retries    requests that clients repeat
            continues
"""

from penstock.server.openai.router import create_openai_router

__all__ = ["create_openai_router"]
