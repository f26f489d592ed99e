"""Graphs behind OpenAI's API: a graph is a model.

router             the routes                             refusals   errors in OpenAI's shape
models             which graph is which model             leaving    clients that go away
chat_completions   /v1/chat/completions                   running    from a conversation to a run
responses          /v1/responses                          wire/      the translation, pure
conversing         a request as one turn of a chat        retold     what of a conversation is kept already
"""

from penstock.server.openai.router import create_openai_router

__all__ = ["create_openai_router"]
