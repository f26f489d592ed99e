"""The address of a Temporal server, and what `--engine` refuses before it connects."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.app import invoke
from penstock.engines.temporal import TemporalSettings
from penstock.errors import InvalidValue


def test_an_address_has_a_usual_port_and_namespace() -> None:
    for url, target, namespace in (
        ("temporal://temporal", "temporal:7233", "default"),
        ("temporal://10.0.0.1:9/prod", "10.0.0.1:9", "prod"),
        ("temporals://[::1]/a%20b", "[::1]:7233", "a b"),
    ):
        settings = TemporalSettings.parse(url)
        assert (settings.target, settings.namespace) == (target, namespace)
        assert settings.has_tls == url.startswith("temporals")
    assert TemporalSettings.parse("temporal://temporal").url == "temporal://temporal:7233/default"


def test_an_address_that_is_none_is_refused() -> None:
    for url in ("", "temporal", "temporal://", "http://temporal:7233", "temporal://h:99999", "temporal://h/a/b"):
        with pytest.raises(InvalidValue, match="temporal://host:port/namespace"):
            TemporalSettings.parse(url)
    with pytest.raises(InvalidValue) as refused:
        TemporalSettings.parse("temporal://me:secret@h/default")
    assert "secret" not in str(refused.value)


def test_keys_and_certificates_come_from_the_environment_and_need_tls(tmp_path: Path) -> None:
    pem = tmp_path / "client.pem"
    pem.write_bytes(b"PEM")
    environ = {"PENSTOCK_TEMPORAL_API_KEY": "secret", "PENSTOCK_TEMPORAL_CA": str(pem)}
    settings = TemporalSettings.parse("temporals://h", environ)
    assert (settings.api_key, settings.ca) == ("secret", b"PEM")
    assert "secret" not in repr(settings) + settings.url
    for url, given, message in (
        ("temporal://h", {"PENSTOCK_TEMPORAL_API_KEY": "secret"}, "sent only over TLS"),
        ("temporal://h", {"PENSTOCK_TEMPORAL_CA": str(pem)}, "settings for TLS"),
        ("temporals://h", {"PENSTOCK_TEMPORAL_CERT": str(pem)}, "both PENSTOCK_TEMPORAL_CERT and"),
        ("temporals://h", {"PENSTOCK_TEMPORAL_CA": str(tmp_path / "none")}, "a file that can be read"),
    ):
        with pytest.raises(InvalidValue, match=message):
            TemporalSettings.parse(url, given)
    assert TemporalSettings.parse("temporal://127.0.0.1", {"PENSTOCK_TEMPORAL_API_KEY": "secret"}).api_key == "secret"


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_an_engine_without_a_shared_database_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = invoke([command, "--engine", "temporal://h", "--db", f"sqlite:///{tmp_path / 'runs.db'}"])
    assert code == 64
    assert "--engine needs a database that all servers and workers reach: --db postgresql://" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_worker_without_an_engine_or_a_database_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, missing in (
        ([], "--db postgresql://"),
        (["--engine", "temporal://h"], "--db postgresql://"),
        (["--db", "postgresql://h/d"], "--engine temporal://host:7233/namespace"),
    ):
        assert invoke(["worker", *arguments]) == 64
        assert f"a worker needs {missing}" in capsys.readouterr().err


def test_a_wrong_address_is_refused_with_the_option_to_correct(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["worker", "--engine", "http://h", "--db", "postgresql://h/d"]) == 64
    assert "engine must be temporal://host:port/namespace" in capsys.readouterr().err
