"""`penstock chat`: one message, and a conversation on a terminal."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest

from penstock.agents.model import Model
from penstock.agents.scripted import ScriptedModel
from penstock.chat.service import ChatService
from penstock.cli.render.events import RunEvent
from penstock.cli.render.renderers import Answer
from penstock.cli.render.screen import Screen
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors as standard_executors
from penstock.server.examples import example_graphs
from tests.cli.conftest import Penstock
from tests.cli.remote.live import ANN, PENSTOCK, TOKENS, Live, Terminal, cutting, serving

NAMED = "name another model in the graph, or tell me how far to count."


@pytest.fixture
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


@pytest.fixture
def slow() -> Iterator[Live]:
    """A server whose model takes its time: it says twenty words a second."""
    with serving(words_per_second=20) as server:
        yield server


def test_one_message_is_answered_with_its_cost(live: Live, penstock: Penstock) -> None:
    ended = penstock("chat", "assistant", "-m", "count to 5", "--url", live.url)
    assert (ended.code, ended.err) == (0, "")
    answer, bill = ended.out.splitlines()
    assert answer == "1, 2, 3, 4, 5."
    cost, tokens, run_id = bill.split(" · ")
    assert cost.strip().startswith("$0.0000")
    assert tokens.endswith(" tokens")
    assert live.ended(run_id) == "completed"


def test_the_first_graph_answers_where_none_is_named(live: Live, penstock: Penstock) -> None:
    assert penstock("chat", "-m", "count to 2", "--url", live.url).out.startswith("1, 2.\n")


def test_each_agent_speaks_on_lines_of_its_own(live: Live, penstock: Penstock) -> None:
    lines = penstock("chat", "pipeline", "-m", "hello", "--url", live.url).out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["You wrote", "· writer", "You wrote"]
    assert len(lines) == 4


def test_message_is_added_to_an_existing_chat(live: Live, penstock: Penstock) -> None:
    penstock("chat", "assistant", "-m", "hello", "--url", live.url)
    (chat,) = live.do(live.stores.chats.list(owner="local"))
    ended = penstock("chat", "--chat", chat.id, "-m", "again", "--url", live.url)
    assert "It is message 2 of our conversation." in ended.out


def test_a_message_that_comes_while_another_is_answered_is_a_branch_beside_it(slow: Live, penstock: Penstock) -> None:
    with Terminal("chat", "assistant", "-m", "count to 1000", "--url", slow.url) as first:
        first.until("1, 2, 3,")
        (chat,) = slow.do(slow.stores.chats.list(owner="local"))
        ended = penstock("chat", "--chat", chat.id, "-m", "count to 2", "--url", slow.url)
        assert (ended.code, ended.out.splitlines()[0]) == (0, "1, 2.")
        first.type("\x03")
        assert first.end() == 130
    messages, _ = slow.do(slow.stores.chats.messages(chat.id))
    assert {one.content: one.parent_id for one in messages if one.role == "user"} == {
        "count to 1000": None,
        "count to 2": None,
    }


def test_a_limit_ends_the_answer_with_3(live: Live, penstock: Penstock) -> None:
    ended = penstock("chat", "pipeline", "-m", "hello", "--max-cost", "0.000001", "--url", live.url)
    assert ended.code == 3
    *_, halted, advice, bill = ended.out.splitlines()
    run_id = bill.rpartition(" ")[2]
    assert halted.startswith("■ halted: budget_exceeded: ")
    assert advice == f"→ raise the limit with: penstock runs grant {run_id} --max-cost USD --url {live.url}"
    assert f"{advice}\n" in penstock("runs", "show", run_id, "--url", live.url).out
    wrong = penstock("chat", "assistant", "-m", "hello", "--max-cost", "much", "--url", live.url)
    assert wrong.code == 64
    assert "'--max-cost': it must be a number of US dollars" in wrong.err


def test_a_chat_that_is_gone_on_with_has_its_graph(penstock: Penstock) -> None:
    ended = penstock("chat", "assistant", "--chat", "c1", "-m", "hello", "--url", "http://127.0.0.1:9")
    assert (ended.code, ended.out) == (64, "")
    assert ended.err == "penstock: a chat has its own graph; use either 'assistant' or --chat\n"


def test_a_graph_or_a_chat_that_is_not_there_is_one_sentence(live: Live, penstock: Penstock) -> None:
    ended = penstock("chat", "unknown", "-m", "hello", "--url", live.url)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "penstock: there is no graph 'unknown'; the server has: assistant, pipeline, publish\n"
    ended = penstock("chat", "--chat", "nothing", "-m", "hello", "--url", live.url)
    assert (ended.code, ended.err) == (2, "penstock: there is no such chat\n")
    with serving(graphs={}) as empty:
        ended = penstock("chat", "-m", "hello", "--url", empty.url)
    assert (ended.code, "the server has no graphs" in ended.err) == (64, True)


def test_an_answer_whose_connection_breaks_is_shown_whole_and_once(live: Live, penstock: Penstock) -> None:
    # The graphs, the message and the events go over one connection, which is cut again and again.
    with cutting(live.url, [1_100, 2_500, 1_000, 1_000]) as url:
        ended = penstock("chat", "assistant", "-m", "count to 100", "--url", url)
    assert ended.code == 0
    assert len(live.do(live.stores.runs.list())) == 1
    assert ended.out.splitlines()[0] == ", ".join(map(str, range(1, 101))) + "."


@contextmanager
def taken_over(live: Live, model: Model) -> Iterator[None]:
    """The host behind the server is gone, and while the block lasts another one goes on with what it left."""

    async def start() -> RunHost:
        await live.host.close(0)
        executors = await asyncio.to_thread(standard_executors)
        settings = HostSettings(tick_s=0.05, drain_s=0)
        second = RunHost(live.stores, executors=executors, services={"models": {"example": model}}, settings=settings)
        ChatService(second, live.stores.chats)
        await second.start()
        return second

    second = live.do(start())
    try:
        yield
    finally:
        live.do(second.close())


@pytest.mark.parametrize(
    ("again", "shown"),
    [
        (", ".join(map(str, range(1, 41))) + ".", ", ".join(map(str, range(1, 41))) + ".\n"),
        ("Something else.", ", \n· it begins again\nSomething else.\n"),
        ("1, 2, 3, that is all.", ", \n· it begins again\n1, 2, 3, that is all.\n"),
        ("1, 2", ", \n· it begins again\n1, 2\n"),
    ],
    ids=["the same", "something else", "with the same beginning", "less"],
)
def test_answer_resumed_by_another_host_is_shown_once(slow: Live, again: str, shown: str) -> None:
    with Terminal("chat", "assistant", "-m", "count to 1000", "--url", slow.url, TERM="dumb") as terminal:
        terminal.until("1, 2, 3, 4, ")
        with taken_over(slow, ScriptedModel([again])):
            assert terminal.end() == 0
    text = terminal.shown.replace("\r\n", "\n")
    assert shown in text
    assert "Traceback" not in text
    if "begins" not in shown:
        assert text.startswith(shown)


def text(speaker: tuple[str, str], piece: str) -> RunEvent:
    return RunEvent(1, "text.delta", {"node_id": speaker[0], "source": speaker[1], "text": piece})


def tool_call(speaker: tuple[str, str], call: Any) -> RunEvent:
    return RunEvent(1, "tool.call", {"node_id": speaker[0], "source": speaker[1], "call": call})


def test_text_and_tool_calls_repeated_after_a_resume_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(Screen(sys.stdout))
    writer, reader, call = ("a", "main"), ("b", "main"), {"id": "1", "name": "look", "arguments": {}}
    answer.add(text(reader, "I read."))
    for piece in ("Let me", " see."):
        answer.add(text(writer, piece))
    answer.add(tool_call(writer, call))
    answer.add(text(writer, "It is"))
    answer.add(RunEvent(9, "run.resumed", {"epoch": 2}))
    answer.add(text(writer, "Let me see."))  # repeats complete text in one piece
    answer.add(tool_call(writer, call))
    answer.add(text(writer, "It is 5"))
    answer.add(RunEvent(9, "run.resumed", {"epoch": 2}))
    answer.add(text(writer, "Let "))
    answer.add(RunEvent(9, "run.resumed", {"epoch": 2}))
    answer.add(text(writer, "Let me see.It"))
    answer.add(text(writer, " is 5, I think."))
    answer.add(tool_call(writer, {**call, "id": "2"}))
    answer.end(RunEvent(9, "run.completed", {"output": "It is 5, I think."}))
    assert capsys.readouterr().out == "I read.\n· a\nLet me see.\n· calls look\nIt is 5, I think.\n· calls look\n"


def test_agents_that_take_turns_are_distinguished_by_their_nodes_or_by_their_own_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = Answer(Screen(sys.stdout))
    for speaker in (("a", "main/a"), ("b", "main/b"), ("b", "main/b/helper"), ("a", "main/a")):
        answer.add(text(speaker, "Well, "))
        answer.add(text(speaker, "yes."))
    answer.end(RunEvent(9, "run.completed", {"output": "Well, yes."}))
    assert capsys.readouterr().out == "Well, yes.\n· b\nWell, yes.\n· helper\nWell, yes.\n· a\nWell, yes.\n"


@pytest.mark.parametrize("arguments", [["publish", "-m", "spring"], ["publish"]])
def test_question_without_a_terminal_exits_with_4(live: Live, arguments: list[str]) -> None:
    ended = subprocess.run(
        [*PENSTOCK, "chat", *arguments, "--url", live.url],
        input="spring\nand this is not sent any more\n",
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    (run,) = live.do(live.stores.runs.list())
    assert (ended.returncode, run.status) == (4, "waiting")
    assert "? Publish this? You wrote: “spring”" in ended.stdout
    assert "standard input is not a terminal; the run waits on the server" in ended.stderr
    assert f"answer it with: penstock runs answer {run.id} yes --url {live.url} (or no)" in ended.stderr
    (approval,) = live.do(live.stores.approvals.list())
    live.do(live.host.answer(approval.id, "approved", by="local"))
    assert live.ended(run.id) == "completed"


def test_waiting_chat_is_not_followed_without_a_terminal(live: Live, penstock: Penstock) -> None:
    assert penstock("chat", "publish", "-m", "spring", "--url", live.url).code == 4
    (chat,) = live.do(live.stores.chats.list())
    ended = penstock("chat", "--chat", chat.id, "--url", live.url)
    assert (ended.code, "the run waits on the server" in ended.err) == (4, True)
    live.do(live.host.cancel(live.do(live.stores.runs.list())[0].id))


def test_a_question_that_was_answered_before_is_not_put_again(live: Live, penstock: Penstock) -> None:
    with Terminal("chat", "publish", "-m", "spring", "--url", live.url) as first:
        first.until("approve? [y/n] ")
        (approval,) = live.do(live.stores.approvals.list())
        live.do(live.host.answer(approval.id, "approved", by="bob"))
        first.type("n\n")
        first.until("Published: ")  # what was answered first counts
        assert first.end() == 0
    assert "Traceback" not in first.shown


def test_lines_from_a_pipe_are_a_conversation(live: Live, penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "count to 3\n\n/retry\n/edit count to 4\n/continue\n/nonsense\n/edit\n/help\n/quit now\nnot sent\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    ended = penstock("chat", "assistant", "--url", live.url)
    assert (ended.code, ended.err) == (0, "")
    printed = [line for line in ended.out.splitlines() if not line.startswith((" ", "/"))]
    assert printed[:3] == ["1, 2, 3.", "1, 2, 3.", "1, 2, 3, 4."]
    assert "there is no more to it." in printed[3]
    assert "there is no command /nonsense" in printed
    assert "there is no command /quit" not in printed
    assert "not sent" not in ended.out
    assert "/edit needs the new text" in ended.out
    assert printed[-1].startswith("Continue this chat with: penstock chat --chat ")


def test_ctrl_c_ends_a_conversation_from_a_pipe(
    live: Live, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(prompt: str) -> str:
        calls.append(prompt)
        raise KeyboardInterrupt

    calls: list[str] = []
    monkeypatch.setattr("builtins.input", interrupted)
    assert (penstock("chat", "assistant", "--url", live.url).code, calls) == (0, [""])


def test_retry_and_edit_need_a_message(live: Live, penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/retry\n/continue\n/edit x\n/quit\n"))
    ended = penstock("chat", "assistant", "--url", live.url)
    assert (ended.code, ended.out) == (0, "there is no message yet\n" * 3)


def test_text_that_would_steer_a_terminal_does_not(live: Live, penstock: Penstock) -> None:
    ended = penstock("chat", "assistant", "-m", "a\x1b[2Jb\u2028c\x07d\ud800", "--url", live.url)
    assert ended.code in (0, 2)
    assert not {"\x1b", "\x07", "\u2028"} & set(ended.out + ended.err)


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(slow: Live) -> None:
    with Terminal("chat", "assistant", "--url", slow.url, NO_COLOR="1") as terminal:
        terminal.until("you › ")
        terminal.type("count to 1000\n")
        terminal.until("1, 2, 3,")
        terminal.type("\x03")
        terminal.until("stopped; the text so far is kept")
        (run,) = slow.do(slow.stores.runs.list())
        assert " tokens · " in terminal.until(run.id)
        terminal.until("you › ")
        terminal.type("/continue\n")
        terminal.until("31, 32, 33,")  # from where it had been stopped, and not from the beginning
        terminal.type("\x03")
        terminal.until("stopped; the text so far is kept")
        terminal.until("you › ")
        terminal.type("\x04")
        terminal.until("penstock chat --chat ")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.shown
    stopped = slow.do(slow.stores.runs.list(statuses=("cancelled",)))
    assert [run.error for run in stopped] == ["Ctrl-C in the terminal"] * 2


def test_on_a_terminal_a_message_that_is_stopped_is_130(slow: Live) -> None:
    with Terminal("chat", "assistant", "-m", "count to 1000", "--url", slow.url) as terminal:
        terminal.until("1, 2, 3,")
        terminal.type("\x03")
        assert terminal.end() == 130
    assert "stopped; the text so far is kept" in terminal.shown


def test_on_a_terminal_the_answering_graph_is_named(live: Live, penstock: Penstock) -> None:
    with Terminal("chat", "--url", live.url) as terminal:
        terminal.until("Chat with assistant. Ctrl-C stops")
    penstock("chat", "pipeline", "-m", "hello", "--url", live.url)
    (chat,) = live.do(live.stores.chats.list(owner="local"))
    with Terminal("chat", "--chat", chat.id, "--url", live.url) as terminal:
        terminal.until("Chat with pipeline. Ctrl-C stops")


def test_on_a_terminal_ctrl_c_at_the_prompt_clears_the_line_and_leaves_when_it_comes_twice(live: Live) -> None:
    with Terminal("chat", "assistant", "--url", live.url, NO_COLOR="1") as terminal:
        terminal.until("you › ")
        terminal.type("this is not sent")
        terminal.until("this is not sent")
        terminal.interrupt()
        terminal.until("press Ctrl-D, or Ctrl-C again, to exit.")
        terminal.until("you › ")
        terminal.type("count to 2\n")
        terminal.until("1, 2.")
        terminal.until("you › ")
        terminal.interrupt()
        terminal.until("again, to exit.")
        terminal.until("you › ")
        terminal.interrupt()
        assert terminal.end() == 0
    assert "Traceback" not in terminal.shown
    assert len(live.do(live.stores.runs.list())) == 1


@pytest.mark.parametrize("arguments", [["-m", "count to 1000"], []], ids=["one message", "a conversation"])
def test_on_a_terminal_a_failed_cancel_request_is_reported_with_advice(arguments: list[str]) -> None:
    with serving(words_per_second=20) as slow:
        terminal = Terminal("chat", "assistant", *arguments, "--url", slow.url, NO_COLOR="1", columns=800)
        if not arguments:
            terminal.until("you › ")
            terminal.type("count to 1000\n")
        terminal.until("1, 2, 3,")
        (run,) = slow.do(slow.stores.runs.list())
    with terminal:
        terminal.type("\x03")
        terminal.until("penstock: the cancel request did not reach the server: ")
        terminal.until(f"no server answers at {slow.url}")
        terminal.until(f"when it is back, use: penstock runs cancel {run.id} --url {slow.url}")
        if arguments:
            assert terminal.end() == 130
        else:
            terminal.until("you › ")


def mailing() -> dict[str, Any]:
    """A graph whose agent has a tool that needs approval."""
    document = deepcopy(dict(example_graphs()["assistant"]))
    takes = {"type": "object", "properties": {"text": {"type": "string"}}}
    sent = {
        "nodes": [
            {"id": "in", "type": "input"},
            {"id": "out", "type": "prompt-template", "data": {"template": "sent {{ mail.text }}"}},
        ],
        "edges": [
            {"id": "e", "source": "in", "sourceHandle": "output", "target": "out", "targetHandle": "mail"}
            | {"data": {"channel": "flow"}}
        ],
    }
    data = {"graph": sent, "parameters": takes, "description": "Send a mail.", "needs_approval": True}
    document["nodes"].append({"id": "send_mail", "type": "tool", "data": data})
    link = {"id": "l", "source": "send_mail", "sourceHandle": "tool", "target": "assistant", "targetHandle": "tools"}
    document["edges"].append({**link, "data": {"channel": "link"}})
    return document


def test_on_a_terminal_the_arguments_of_a_call_are_shown_for_approval() -> None:
    with (
        serving(graphs={"mail": mailing()}) as live,
        Terminal(
            "chat", "mail", "-m", "send_mail now\x1b[2J", "--url", live.url, NO_COLOR="1", columns=400
        ) as terminal,
    ):
        terminal.until("? May send_mail run?")
        shown = terminal.until("approve? [y/n] ")
        assert '  value: {"tool": "send_mail", "arguments": {"text": "send_mail now' in shown
        assert "\x1b[2J" not in shown
        (run,) = live.do(live.stores.runs.list())
        assert (
            f"to continue with other arguments: penstock runs answer {run.id} yes --edit JSON --url {live.url}" in shown
        )
        terminal.type("y\n")
        terminal.until("The tool send_mail says: sent send_mail now")
        assert terminal.end() == 0


@pytest.mark.parametrize(("keys", "outcome"), [("y\n", "Published: You wrote"), ("n\n", "Not published: rejected")])
def test_on_a_terminal_a_question_is_answered(live: Live, keys: str, outcome: str) -> None:
    with Terminal("chat", "publish", "-m", "spring", "--url", live.url, NO_COLOR="1") as terminal:
        terminal.until("? Publish this?")
        terminal.until("approve? [y/n] ")
        terminal.type(keys)
        terminal.until(outcome)
        assert terminal.end() == 0


@pytest.mark.parametrize(("keys", "outcome"), [("yes\n", "Published: You wrote"), ("n\n", "Not published: rejected")])
def test_on_a_terminal_an_invalid_verdict_is_prompted_for_again(live: Live, keys: str, outcome: str) -> None:
    with Terminal("chat", "publish", "-m", "spring", "--url", live.url, NO_COLOR="1") as terminal:
        terminal.until("approve? [y/n] ")
        for word in ("", "maybe", "count to 3", "yes, but later", ""):
            terminal.type(f"{word}\n")
            terminal.until("that is not an answer; yes or no? ")
        (approval,) = live.do(live.stores.approvals.list())
        assert approval.state == "waiting"
        terminal.type(keys)
        terminal.until(outcome)
        assert terminal.end() == 0


def test_on_a_terminal_what_was_typed_before_a_question_answers_nothing(slow: Live) -> None:
    with Terminal("chat", "publish", "-m", "spring", "--url", slow.url, NO_COLOR="1") as terminal:
        terminal.until("You wrote")  # it is being written, and the question comes after it
        terminal.type("\nyes\n")
        terminal.until("approve? [y/n] ")
        terminal.type("perhaps\n")
        terminal.until("that is not an answer; yes or no? ")
        terminal.type("yes\n")
        terminal.until("Published: You wrote")
        assert terminal.end() == 0


def test_on_a_terminal_ctrl_d_leaves_a_question_to_others_and_a_message_with_4(live: Live) -> None:
    with Terminal("chat", "publish", "-m", "spring", "--url", live.url, NO_COLOR="1", columns=400) as terminal:
        terminal.until("approve? [y/n] ")
        terminal.type("\x04")
        terminal.until("the run waits; answer later with: penstock runs answer ")
        terminal.until(f"yes --url {live.url} (or no)")
        assert terminal.end() == 4
    (run,) = live.do(live.stores.runs.list())
    assert run.status == "waiting"
    (approval,) = live.do(live.stores.approvals.list())
    live.do(live.host.answer(approval.id, "approved", by="local"))
    assert live.ended(run.id) == "completed"


def test_on_a_terminal_ctrl_d_at_a_question_is_the_prompt_again_where_ctrl_c_stops_nothing(live: Live) -> None:
    with Terminal("chat", "publish", "--url", live.url, NO_COLOR="1", columns=400) as terminal:
        terminal.until("you › ")
        terminal.type("spring\n")
        terminal.until("approve? [y/n] ")
        terminal.type("\x04")
        terminal.until("the run waits; ")
        terminal.until(" or with: penstock chat --chat ")
        terminal.until("you › ")
        terminal.interrupt()
        terminal.until("you › ")
        terminal.interrupt()
        assert terminal.end() == 0
    (run,) = live.do(live.stores.runs.list())
    assert run.status == "waiting"
    (chat,) = live.do(live.stores.chats.list())
    with Terminal("chat", "--chat", chat.id, "--url", live.url, NO_COLOR="1") as terminal:
        terminal.until("approve? [y/n] ")
        terminal.type("yes\n")
        terminal.until("Published: You wrote")
    assert live.ended(run.id) == "completed"


def test_on_a_terminal_ctrl_c_at_a_question_stops_the_run(live: Live) -> None:
    with Terminal("chat", "publish", "-m", "spring", "--url", live.url) as terminal:
        terminal.until("approve? [y/n] ")
        terminal.interrupt()
        assert terminal.end() == 130
    assert "Traceback" not in terminal.shown


def test_continued_chat_shows_its_history_and_follows_an_active_answer(slow: Live) -> None:
    with Terminal("chat", "assistant", "--url", slow.url, NO_COLOR="1") as first:
        first.until("you › ")
        first.type("count to 60\n")
        first.until("1, 2, 3,")
    (chat,) = slow.do(slow.stores.chats.list(owner="local"))
    with Terminal("chat", "--chat", chat.id, "--url", slow.url, NO_COLOR="1") as second:
        second.until("count to 60")
        second.until("1, 2, 3,")
        second.until("60.")
        second.until("you › ")
        second.type("/retry\n")
        second.until("1, 2, 3,")


def test_a_wrong_token_is_one_sentence(penstock: Penstock) -> None:
    with serving(tokens=TOKENS) as live:
        assert "set PENSTOCK_TOKEN" in penstock("chat", "-m", "x", "--url", live.url, "--token", "y" * 20).err
        assert penstock("chat", "assistant", "-m", "count to 2", "--url", live.url, "--token", ANN).code == 0


def test_a_server_that_goes_in_the_middle_of_an_answer_and_stays_away_is_75(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.cli.remote import connection

    monkeypatch.setattr(connection, "PAUSES_S", (0.0,) * 6)
    with serving(words_per_second=20) as live, cutting(live.url, [4_000, *[0] * 100]) as url:
        ended = penstock("chat", "assistant", "-m", "count to 1000", "--url", url)
    assert ended.code == 75
    waiting, lost = ended.err.splitlines()
    assert waiting.startswith(f"penstock: no events from {url}: ")
    assert lost.startswith(f"penstock: {url} did not answer for 0 s (")
    assert lost.endswith(f" --url {url}")
