"""OpenAI-compatible API for graphs: each graph is a model.

router       the routes, and /v1/chat/completions     chat_turn   a request as one turn of a chat
responses    /v1/responses                            refusals    errors in OpenAI's format
run_handle   start a run for a request, follow it     wire/       translation between formats, without I/O
service      what these share: graphs as models, and a request to run one
"""

from penstock.server.openai.router import create_openai_router

__all__ = ["create_openai_router"]
