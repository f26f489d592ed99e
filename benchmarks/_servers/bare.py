"""A FastAPI app that answers a constant, and streams words: the floor."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from benchmarks._servers.words import ANSWER, words

app = FastAPI()


@app.post("/v1/chat/completions")
async def complete(body: dict[str, Any]) -> Any:
    """Answer as OpenAI's API does."""
    if not body.get("stream"):
        return {"choices": [{"message": {"role": "assistant", "content": ANSWER}}]}

    async def frames() -> AsyncIterator[str]:
        async for word in words(body["messages"][-1]["content"]):
            yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
