"""OpenAI's SDK against `penstock serve`, the process that users start: its command line, its socket, its database."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from tests.cli.service.test_serve import served
from tests.server.test_openai import user_message


@pytest.mark.usefixtures("forks")
def test_the_sync_client_is_answered_whole_and_in_pieces_on_one_connection(tmp_path: Path) -> None:
    with (
        served("--db", f"sqlite:///{tmp_path}/kept.db") as server,
        OpenAI(api_key="unasked", base_url=f"{server.url}/v1", timeout=30, max_retries=0) as client,
    ):
        whole = client.chat.completions.create(model="assistant", messages=user_message("hello"))
        with client.chat.completions.create(model="assistant", messages=user_message("hello"), stream=True) as chunks:
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        after = client.models.list()
    assert whole.choices[0].message.content == "".join(pieces)
    assert len([one for one in pieces if one]) > 1
    assert "assistant" in [one.id for one in after]
