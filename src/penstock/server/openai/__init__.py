"""OpenAI-compatible API for graphs: each graph is a model.

router      the routes, and /v1/chat/completions              entry      which parameters a graph can apply
responses   /v1/responses                                     refusals   errors in OpenAI's format
runs        graphs as models; runs of them, which may         wire/      translation between formats, without I/O
            continue a chat or follow tool calls              retries    requests that clients repeat
"""

from penstock.server.openai.router import create_openai_router

__all__ = ["create_openai_router"]
