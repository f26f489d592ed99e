"""What an operator may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.server.auth import TokensMissing, User
from penstock.server.settings import ServerSettings, is_loopback

SECRET = "0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65_536),
        ("port", "80"),
        ("port", True),
        ("max_body_bytes", 0),
        ("max_body_bytes", 1.5),
        ("max_streams", None),
        ("max_mcp_sessions_per_user", 0),
        ("mcp_idle_s", 0),
        ("body_timeout_s", float("nan")),
        ("body_timeout_s", 0),
        ("heartbeat_s", float("inf")),
        ("ready_timeout_s", "2"),
        ("allowed_hosts", ("http://x",)),
        ("allowed_hosts", ("x:80",)),
        ("allowed_hosts", ("*",)),
        ("allowed_origins", ("x",)),
        ("allowed_origins", ("https://x/path",)),
        ("host", "0.0.0.0"),
    ],
)
def test_invalid_settings_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        ServerSettings(**{name: value})
    assert caught.value.field == name


def test_settings_come_from_an_environment_and_from_a_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# mine\nbob:viewer:{SECRET}-bob\n")
    environ = {
        "PENSTOCK_HOST": "0.0.0.0",
        "PENSTOCK_PORT": " 9000 ",
        "PENSTOCK_ALLOWED_HOSTS": "Penstock.example, other.example,",
        "PENSTOCK_ALLOWED_ORIGINS": "https://ui.example",
        "PENSTOCK_TOKENS": f"ann:admin:{SECRET}-ann",
        "PENSTOCK_TOKENS_FILE": str(file),
    }
    settings = ServerSettings.from_env(environ, port=9_001)
    assert (settings.host, settings.port) == ("0.0.0.0", 9_001)
    assert settings.hosts == {"localhost", "127.0.0.1", "[::1]", "penstock.example", "other.example"}
    assert settings.allowed_origins == ("https://ui.example",)
    assert [token.user for token in settings.tokens] == [User("ann", "admin"), User("bob", "viewer")]
    assert ServerSettings.from_env({}) == ServerSettings()


@pytest.mark.parametrize("environ", [{"PENSTOCK_PORT": "eighty"}, {"PENSTOCK_TOKENS_FILE": "/nowhere/tokens"}])
def test_an_invalid_environment_is_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidValue) as caught:
        ServerSettings.from_env(environ)
    assert caught.value.field == next(iter(environ))


NO_TOKENS = ["", "\n \n", "# ann:user:canary-of-ann-01\n", "  # x"]


@pytest.mark.parametrize("text", NO_TOKENS)
def test_an_empty_source_of_tokens_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    named = {"PENSTOCK_TOKENS": text, "PENSTOCK_TOKENS_FILE": str(file)}
    for names in (["PENSTOCK_TOKENS"], ["PENSTOCK_TOKENS_FILE"], ["PENSTOCK_TOKENS", "PENSTOCK_TOKENS_FILE"]):
        with pytest.raises(TokensMissing) as caught:
            ServerSettings.from_env({name: named[name] for name in names})
        where = " and ".join(name if name == "PENSTOCK_TOKENS" else repr(str(file)) for name in names)
        assert str(caught.value).startswith(f"there is no token in {where}: add lines of name:role:secret, or")
        assert "canary" not in str(caught.value)
    with pytest.raises(TokensMissing, match="there is no token in PENSTOCK_TOKENS_FILE: "):
        ServerSettings.from_env({"PENSTOCK_TOKENS_FILE": ""})


@pytest.mark.parametrize("text", NO_TOKENS)
def test_one_source_of_tokens_is_enough(tmp_path: Path, text: str) -> None:
    file, token = tmp_path / "tokens", f"ann:user:{SECRET}"
    for env_text, written in ((text, token), (token, text)):
        file.write_text(written)
        found = ServerSettings.from_env({"PENSTOCK_TOKENS": env_text, "PENSTOCK_TOKENS_FILE": str(file)})
        assert [one.user.name for one in found.tokens] == ["ann"]


@pytest.mark.parametrize(
    ("host", "is_so"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.0.2.1", False), ("localhost.example", False), ("", False), ("::ffff:127.0.0.1", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognized(host: str, is_so: bool) -> None:
    assert is_loopback(host) == is_so
