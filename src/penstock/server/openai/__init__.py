"""OpenAI-compatible API for graphs: each graph is a model.

router      the routes, and /v1/chat/completions              refusals   errors in OpenAI's format
responses   /v1/responses                                     wire/      translation between formats, without I/O
run_start   start a run, in the chat that a request continues
service     what these share: graphs as models, a request to run one, and its run
"""

from penstock.server.openai.router import create_openai_router

__all__ = ["create_openai_router"]
