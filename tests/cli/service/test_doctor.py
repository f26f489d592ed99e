"""`penstock doctor`: every finding, and what it advises."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

from penstock.cli.service.doctor import check, check_gateway
from penstock.kernel import executor
from penstock.providers.mcp import installed
from penstock.server.checkup import Finding, guarded
from penstock.storage import newest_version
from penstock.testing import ManualClock
from penstock.testing.provider import FakeProviderServer
from tests.cli.conftest import Penstock
from tests.cli.remote.live import Live, serving
from tests.cli.service.test_db import work_on_a_run

CLOSED_PORT = "http://127.0.0.1:9"
URL = "sqlite:///kept.db"


@pytest.fixture
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


def found(name: str, db: str | None = None, url: str = CLOSED_PORT) -> Finding:
    return next(one for one in check(db, url) if one.name == name)


def test_doctor_exits_with_0_if_nothing_is_broken(penstock: Penstock, live: Live) -> None:
    penstock("db", "upgrade", "--db", URL)
    ended = penstock("doctor", "--db", URL, "--url", live.url)
    assert (ended.code, ended.err) == (0, "")
    assert "✗" not in ended.out
    for name in ("python", "penstock", "sqlite", "server", "node types", "database", "running server"):
        assert f"✓ {name} " in ended.out


def test_json_has_the_same_findings(penstock: Penstock) -> None:
    read = json.loads(penstock("doctor", "--json", "--url", CLOSED_PORT).out)
    assert {one["state"] for one in read} <= {"ok", "missing", "broken"}
    assert set(read[0]) == {"name", "state", "found", "advice"}


def test_doctor_shows_whether_a_key_is_set_and_never_its_value(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert found("OPENAI_API_KEY") == Finding("OPENAI_API_KEY", "ok", "set")
    assert found("ANTHROPIC_API_KEY").state == "missing"
    ended = penstock("doctor", "--url", CLOSED_PORT)
    assert "sk-canary" not in ended.out + ended.err


@pytest.mark.parametrize(
    ("package", "extra", "purpose"),
    [
        ("asyncpg", "postgres", "PostgreSQL"),
        ("mcp", "mcp", "tools of MCP servers, and being one"),
    ],
)
def test_a_part_that_is_not_installed_is_missing_with_the_command_that_installs_it(
    package: str, extra: str, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata.version

    def without_it(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", without_it)
    assert found(extra) == Finding(
        extra, "missing", f"not installed; for {purpose}", f"pip install 'penstock[{extra}]'"
    )


def test_a_version_of_the_mcp_library_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "VERSION", "1.9.4")
    version = metadata.version("mcp")
    assert found("mcp") == Finding("mcp", "broken", f"mcp {version}", str(installed.mcp_problem()))


def test_a_sqlite_that_is_too_old_is_broken(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    assert found("sqlite").state == "broken"
    assert penstock("doctor", "--url", CLOSED_PORT).code == 2


def test_a_node_type_that_cannot_be_loaded_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = metadata.EntryPoint("bad", "nothing.there:Node", "penstock.executors")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [broken])
    executor._installed.cache_clear()
    node_types = found("node types")
    executor._installed.cache_clear()
    assert node_types.state == "broken"
    assert "bad (" in node_types.found


def test_no_price_table_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.runtime.billing import prices

    assert found("price table").state == "ok"
    monkeypatch.setattr(prices, "_DEFAULT", prices.PriceBook(use_genai_prices=False))
    assert found("price table").state == "missing"


def test_a_database_is_looked_at_and_not_made(directory: Path, penstock: Penstock) -> None:
    assert found("database").found == "not checked"
    assert found("database", URL).advice == "penstock serve creates it"
    assert list(directory.iterdir()) == []
    penstock("db", "upgrade", "--db", URL)
    assert found("database", URL).found.startswith(f"version {newest_version()}, ")
    assert found("database", "memory:").state == "ok"


def test_a_database_that_cannot_be_used_is_broken(directory: Path, penstock: Penstock) -> None:
    penstock("db", "upgrade", "--db", URL)
    with closing(sqlite3.connect("kept.db")) as kept:
        kept.execute("PRAGMA user_version = 99")
    newer = f"version 99, newer than the version {newest_version()} of this Penstock"
    assert found("database", URL) == Finding("database", "broken", newer, "use a newer Penstock")
    (directory / "text.db").write_text("a text that goes on for a while\n" * 40)
    (directory / "empty.db").touch()
    assert "not a database" in found("database", "text.db").found
    assert found("database", "empty.db").state == "missing"
    assert found("database", "mysql://here").state == "broken"
    assert found("database", "postgresql://ann:canary@127.0.0.1:1/none").state == "broken"
    assert "canary" not in found("database", "postgresql://ann:canary@127.0.0.1:1/none").found


def test_a_file_that_cannot_be_written_and_a_full_disk_are_broken(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    penstock("db", "upgrade", "--db", URL)
    full = shutil.disk_usage(".")._replace(free=1_000_000)
    with monkeypatch.context() as disk:
        disk.setattr(shutil, "disk_usage", lambda _: full)
        assert "only 1 MB free" in found("database", URL).found
    with monkeypatch.context() as rights:
        rights.setattr(os, "access", lambda *_, **__: False)
        assert "cannot be written" in found("database", URL).found


def test_where_no_database_could_be_made_is_broken(penstock: Penstock, directory: Path) -> None:
    assert found("database", "sqlite:////nonexistent/x.db") == Finding(
        "database", "broken", "there is no folder /nonexistent", "make it, or name another file"
    )
    assert penstock("doctor", "--db", "sqlite:////nonexistent/x.db", "--url", CLOSED_PORT).code == 2
    (directory / "text").write_text("x")
    assert found("database", "text/x.db").state == "broken"


def test_a_ledger_that_is_gone_is_broken(directory: Path) -> None:
    work_on_a_run()
    assert found("database", URL).state == "ok"
    (directory / "kept.db.ledger").unlink()
    lost = found("database", URL)
    assert (lost.state, "kept.db.ledger' is gone" in lost.found) == ("broken", True)
    assert not (directory / "kept.db.ledger").exists()


@pytest.mark.parametrize("text", ["", "# ann:user:canary-of-ann-01\n"])
def test_tokens_that_are_named_and_not_there_are_broken(
    penstock: Penstock, directory: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (directory / "none").write_text(text)
    ended = penstock("doctor", "--tokens", "none", "--url", CLOSED_PORT)
    assert (ended.code, "✗ tokens             there is no token in 'none': add" in ended.out) == (2, True)
    assert "canary" not in ended.out
    monkeypatch.setenv("PENSTOCK_TOKENS", text)
    assert found("tokens").found.startswith("there is no token in PENSTOCK_TOKENS: ")


def about_tokens(file: str | None, clock: ManualClock) -> Finding:
    return next(one for one in check(None, CLOSED_PORT, file, clock=clock) if one.name == "tokens")


def test_tokens_that_are_over_or_soon_will_be_are_named_and_nothing_else_of_them(directory: Path) -> None:
    ends = {"ann": " until=2026-01-01", "bob": " until=2026-01-08T00:00:00Z", "bea": " until=2026-01-08", "root": ""}
    (directory / "tokens").write_text("\n".join(f"{name}:user:canary-of-{name}-01{end}" for name, end in ends.items()))
    clock, advice = ManualClock(), "add new tokens, then remove the old ones"
    assert about_tokens("tokens", clock) == Finding("tokens", "missing", "expire within 7 days: ann", advice)
    clock.advance_ns(1)
    assert about_tokens("tokens", clock).found == "expire within 7 days: ann, bob"
    clock.advance(86_400)
    assert about_tokens("tokens", clock) == Finding(
        "tokens", "missing", "expired: ann; expire within 7 days: bob, bea", advice
    )
    clock.advance(30 * 86_400)
    assert about_tokens("tokens", clock).found == "expired: ann, bob, bea"


def test_tokens_that_last_are_well_and_ones_of_which_none_is_good_are_broken(
    directory: Path, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found("tokens").state == "missing"
    monkeypatch.setenv("PENSTOCK_TOKENS", "ann:user:canary-of-ann-01 until=9999-12-31")
    assert found("tokens") == Finding("tokens", "ok", "1, none expires within 7 days")
    monkeypatch.delenv("PENSTOCK_TOKENS")
    (directory / "old").write_text("ann:user:canary-of-ann-01 until=2020-01-01\n")
    ended = penstock("doctor", "--tokens", "old", "--url", CLOSED_PORT)
    assert (ended.code, "✗ tokens             expired: ann  → " in ended.out) == (2, True)
    assert "canary" not in ended.out + ended.err
    (directory / "odd").write_text("ann:user:canary-of-ann-01 until=2020-02-30\n")
    monkeypatch.setenv("PENSTOCK_TOKENS_FILE", "odd")
    odd = found("tokens")
    assert (odd.state, "canary" in odd.found) == ("broken", False)
    assert odd.found.startswith("line 1 of the tokens: until= must be a date and time that exist")
    assert about_tokens("nothing", ManualClock()).state == "broken"


def about_spending(*tokens: str, has_ceiling: bool = False) -> list[Finding]:
    Path("tokens").write_text("\n".join(tokens))
    found = check(None, CLOSED_PORT, "tokens", has_ceiling=has_ceiling, clock=ManualClock())
    return [one for one in found if one.name == "spending"]


def test_several_users_without_a_ceiling_are_reported_and_one_is_not(directory: Path) -> None:
    ann, bob = "ann:user:canary-of-ann-01", "bob:admin:canary-of-bob-01"
    ends, looks = "eve:user:canary-of-eve-01 until=2020-01-01", "vera:viewer:canary-of-vera-01"
    problem, advice = "each of 2 users may start runs without a cost ceiling", "set --cost-ceiling or --user-daily for"
    (finding,) = about_spending(ann, bob, ends, looks)
    assert (finding.state, finding.found) == ("missing", problem)
    assert finding.advice.startswith(advice)
    assert about_spending(ann, "ann:user:canary-of-ann-02", ends, looks) == []
    assert about_spending(ann, bob, has_ceiling=True) == []
    assert about_spending("") == about_spending("ann:user") == [], "that is a finding about tokens"


@pytest.mark.parametrize("ceiling", ["cost-ceiling", "user-daily"])
def test_a_ceiling_that_serve_is_given_is_given_to_doctor_too(
    penstock: Penstock, directory: Path, monkeypatch: pytest.MonkeyPatch, ceiling: str
) -> None:
    (directory / "tokens").write_text("ann:user:canary-of-ann-01\nbob:user:canary-of-bob-01\n")
    bare = penstock("doctor", "--tokens", "tokens", "--url", CLOSED_PORT)
    assert "· spending           each of 2 users may" in bare.out
    assert "spending" not in penstock("doctor", "--tokens", "tokens", "--url", CLOSED_PORT, f"--{ceiling}", "5").out
    monkeypatch.setenv(f"PENSTOCK_{ceiling.upper().replace('-', '_')}", "5")
    assert "spending" not in penstock("doctor", "--tokens", "tokens", "--url", CLOSED_PORT).out


def test_a_server_that_does_not_answer_is_missing_and_an_address_that_is_none_is_broken(live: Live) -> None:
    assert found("running server", url=live.url) == Finding("running server", "ok", f"answers at {live.url}")
    assert found("running server", url=CLOSED_PORT).state == "missing"
    assert found("running server", url="nonsense").state == "broken"


def test_a_check_that_fails_has_found_something() -> None:
    def fails() -> Finding:
        raise RuntimeError("no")

    assert guarded("it", fails) == Finding("it", "broken", "RuntimeError: no")


def _gateway(monkeypatch: pytest.MonkeyPatch, url: str, *named: str, db: str | None = None) -> dict[str, Finding]:
    for name, value in {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "sk-right"}.items():
        monkeypatch.setenv(name, value)
    for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return {finding.name: finding for finding in check_gateway(db, named)}


def test_upstreams_list_their_models_for_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeProviderServer() as provider:
        local = f"local=anthropic+{provider.url}"
        findings = _gateway(monkeypatch, provider.openai_url, local, f"gone={CLOSED_PORT}")
    assert findings["upstream openai"].state == "ok"
    assert "answers, with its key" in findings["upstream openai"].found
    assert "answers, with no key" in findings["upstream local"].found
    assert findings["upstream anthropic"].state == "missing"
    assert (findings["upstream gone"].state, "cannot be reached" in findings["upstream gone"].found) == ("broken", True)
    assert {request.path for request in provider.requests} == {"/v1/models"}
    assert provider.requests[0].headers["authorization"] == "Bearer sk-right"
    assert not any("sk-right" in str(finding) for finding in findings.values())


@pytest.mark.parametrize(("status", "found"), [(401, "refuses the key (401)"), (503, "answers with 503")])
def test_upstream_that_refuses_its_key_is_broken(monkeypatch: pytest.MonkeyPatch, status: int, found: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=_answer_once, args=(listener, status))
        answering.start()
        finding = _gateway(monkeypatch, f"http://127.0.0.1:{listener.getsockname()[1]}/v1")["upstream openai"]
        answering.join()
    assert (finding.state, finding.found.partition("/v1 ")[2]) == ("broken", found)
    assert "OPENAI_API_KEY" in finding.advice


def _answer_once(listener: socket.socket, status: int) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(f"HTTP/1.1 {status} No\r\ncontent-length: 0\r\n\r\n".encode())


def test_gateway_keys_without_a_budget_are_named(
    penstock: Penstock, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> Finding:
        return _gateway(monkeypatch, CLOSED_PORT, db=URL)["gateway keys"]

    penstock("db", "upgrade", "--db", URL)
    assert (keys().state, keys().found) == ("missing", "none is active")
    penstock("tokens", "create", "ann", "--gateway", "--daily", "5", "--db", URL)
    assert keys().found == "1 active, each with a budget"
    penstock("tokens", "create", "bob", "--gateway", "--db", URL)
    assert (keys().state, keys().found) == ("missing", "2 active; without a budget: bob")


def test_gateway_is_checked_on_request_only(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeProviderServer() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.openai_url)
        assert "upstream" not in penstock("doctor").out
        assert provider.requests == ()
        assert "upstream openai" in penstock("doctor", "--gateway").out
