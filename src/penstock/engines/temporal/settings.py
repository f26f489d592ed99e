"""The address of Temporal, and the settings of the connection.

`temporal://host:port/namespace` is a connection without TLS, for a private network; `temporals://…` has TLS. Secrets
are not in the URL, which is shown in messages: they come from the environment.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.errors import InvalidValue

DEFAULT_PORT = 7233
DEFAULT_NAMESPACE = "default"
EXPECTED = "temporal://host:port/namespace, or temporals://… with TLS"
API_KEY, CA_FILE = "PENSTOCK_TEMPORAL_API_KEY", "PENSTOCK_TEMPORAL_CA"
CERTIFICATE, PRIVATE_KEY = "PENSTOCK_TEMPORAL_CERT", "PENSTOCK_TEMPORAL_KEY"
SERVER_NAME = "PENSTOCK_TEMPORAL_SERVER_NAME"


@dataclass(frozen=True, slots=True)
class TemporalSettings:
    """The address of a Temporal server, and the credentials to present to it."""

    host: str
    port: int = DEFAULT_PORT
    namespace: str = DEFAULT_NAMESPACE
    has_tls: bool = False
    api_key: str | None = field(default=None, repr=False)
    ca: bytes | None = field(default=None, repr=False)
    """Certificates to trust instead of those of the system, as PEM."""
    certificate: bytes | None = field(default=None, repr=False)
    """Certificate of this client, as PEM, with its `private_key`."""
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
    """Name that the server's certificate must have, if it is not its host."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidValue("engine", self.url, f"both {CERTIFICATE} and {PRIVATE_KEY}, or neither")
        if not self.has_tls and (self.ca or self.certificate or self.server_name):
            raise InvalidValue("engine", self.url, "temporals://…, because the environment has settings for TLS")
        if self.api_key is not None and not self.has_tls and not _is_loopback(self.host):
            raise InvalidValue("engine", self.url, f"temporals://…: {API_KEY} is sent only over TLS")

    @property
    def target(self) -> str:
        """The address as host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a URL, without secrets."""
        return f"temporal{'s' if self.has_tls else ''}://{self.target}/{self.namespace}"

    @classmethod
    def parse(cls, url: str, environ: Mapping[str, str] | None = None) -> TemporalSettings:
        """Parse a URL; keys and certificates come from the environment. Raises InvalidValue if either is wrong."""
        environ = {} if environ is None else environ
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise InvalidValue("engine", url, EXPECTED) from None
        namespace = unquote(parts.path.strip("/")) or DEFAULT_NAMESPACE
        is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
        if parts.scheme not in ("temporal", "temporals") or not host or not is_plain:
            shown = re.sub(r"//[^/]*@", "//…@", url)  # a password does not belong in the URL, and not in a message
            raise InvalidValue("engine", shown, EXPECTED)
        if "/" in namespace or not namespace.isprintable():
            raise InvalidValue("engine", url, f"{EXPECTED}; a namespace is one name")
        return cls(
            host,
            DEFAULT_PORT if port is None else port,
            namespace,
            parts.scheme == "temporals",
            environ.get(API_KEY) or None,
            _read(environ, CA_FILE),
            _read(environ, CERTIFICATE),
            _read(environ, PRIVATE_KEY),
            environ.get(SERVER_NAME) or None,
        )


def _read(environ: Mapping[str, str], name: str) -> bytes | None:
    path = environ.get(name)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidValue(name, path, f"a file that can be read ({error.strerror})") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
