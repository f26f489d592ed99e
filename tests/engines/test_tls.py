"""A Temporal server behind TLS that asks for a client's certificate, as a fleet in production has it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.engines.temporal import TemporalSettings
from penstock.engines.temporal import engine as temporal_engine
from penstock.hosting.engine import EngineUnavailable
from tests.engines.fleet import fleet_of
from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.providers.test_stacks_tls import Relay
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "temporal_server"]

NAME = "temporal.example"
PEM = serialization.Encoding.PEM


def written(folder: Path) -> None:
    """Write an authority, and the certificates and keys of a server and a client that it has signed."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    for who in ("ca", "server", "client"):
        key = ca_key if who == "ca" else ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(who))
            .issuer_name(_name("ca"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=who == "ca", path_length=None), critical=True)
            .sign(ca_key, hashes.SHA256())
        )
        secret = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{who}.pem").write_bytes(certificate.public_bytes(PEM))
        (folder / f"{who}.key").write_bytes(secret)


def _name(who: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who)])


def tls_of(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


@pytest.fixture
def settings(temporal_server: TemporalServer, tmp_path: Path) -> Iterator[TemporalSettings]:
    """The address of a port that speaks TLS and passes on to the server, with all that it asks for."""
    written(tmp_path)
    files = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    environ = {f"PENSTOCK_TEMPORAL_{name}": str(tmp_path / file) for name, file in files.items()}
    environ |= {"PENSTOCK_TEMPORAL_SERVER_NAME": NAME, "PENSTOCK_TEMPORAL_API_KEY": "a key"}
    upstream: Any = SimpleNamespace(url=f"http://127.0.0.1:{temporal_server.port}")
    with Relay(upstream, tls_of(tmp_path)).running() as relay:
        yield TemporalSettings.parse(relay.url.replace("https:", "temporals:"), environ)


@pytest.mark.requirement("X-4")
async def test_a_fleet_connects_over_tls_with_its_certificate_and_key(
    settings: TemporalSettings, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[Any] = []
    connect = temporal_engine.connect

    async def connected(settings: TemporalSettings) -> Any:
        client = await connect(settings)
        keys.append(client.service_client.config.api_key)
        return client

    monkeypatch.setattr(temporal_engine, "connect", connected)
    monkeypatch.setattr(TemporalSettings, "parse", lambda url: settings)
    async with fleet_of(postgres_url, settings.url) as fleet:
        await fleet.worker()
        await fleet.front.submit(owner="ann", graph_id="echo", run_id="r", input="x")
        assert (await fleet.front.wait("r")).output == "x"
    assert keys == ["a key", "a key"]


async def test_what_is_missing_to_connect_over_tls_is_named(settings: TemporalSettings) -> None:
    for wrong, why in (
        (replace(settings, certificate=None, private_key=None), "does it ask for PENSTOCK_TEMPORAL_CERT"),
        (replace(settings, ca=None), "an authority that is not trusted here; name it with PENSTOCK_TEMPORAL_CA"),
        (replace(settings, server_name=None), "name the one in it with PENSTOCK_TEMPORAL_SERVER_NAME"),
    ):
        with pytest.raises(EngineUnavailable, match=f"Temporal cannot be reached at {settings.url} .*{why}"):
            await temporal_engine.TemporalEngine(wrong).examine()
