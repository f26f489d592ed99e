"""The configuration files that pages show name commands, options, variables and routes that there are."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from mkdocs.utils import yaml_load

from penstock.kernel.document import parse_graph
from penstock.kernel.graph import GraphInvalid
from tests.docs.shell_commands import problems
from tools.blocks import PAGES, Block, blocks_of
from tools.site.settings import variables

SYSTEMD = {
    "Unit": {"Description", "After"},
    "Service": {
        *("User", "StateDirectory", "WorkingDirectory", "Environment", "EnvironmentFile", "ExecStart", "KillSignal"),
        *("TimeoutStopSec", "Restart", "NoNewPrivileges", "ProtectSystem"),
    },
    "Install": {"WantedBy"},
}
"""Keys of systemd units; a typing error would be one that is not here."""
NGINX = {
    "server": {"listen", "server_name", "location"},
    "location": {
        *("proxy_pass", "proxy_http_version", "proxy_set_header", "proxy_buffering", "proxy_read_timeout"),
        "client_max_body_size",
    },
}
"""Directives by block."""
DRAIN_S = 10
"""`--drain` without the option."""


def systemd(text: str) -> Iterator[str]:
    """Yield what is wrong with a unit."""
    unit = configparser.RawConfigParser(strict=False, dict_type=_Repeated, comment_prefixes="#", interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    for section in unit.sections():
        yield from (f"unknown: [{section}] {key}" for key in unit[section] if key not in SYSTEMD.get(section, ()))
    service = unit["Service"]
    yield from problems(service["ExecStart"])
    for line in service.get("Environment", "").splitlines():
        yield from unknown_variables(line.partition("=")[0])
    drain = re.search(r"--drain (\d+)", service["ExecStart"])
    if int(service["TimeoutStopSec"]) <= (int(drain[1]) if drain else DRAIN_S):
        yield "TimeoutStopSec is not longer than --drain"


class _Repeated(dict[str, Any]):
    """A section in which a key that comes again has a line more."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and isinstance(self.get(key), list):
            value = [*self[key], *value]
        super().__setitem__(key, value)


def nginx(text: str) -> Iterator[str]:
    """Yield what is wrong with a configuration of nginx: its blocks, its directives, where it passes requests to."""
    inside: list[str] = []
    for line in (line.strip() for line in text.splitlines()):
        name = line.split()[0] if line else ""
        if line.endswith("{"):
            yield from _unknown_directive(inside, name)
            inside.append(name)
        elif line == "}":
            inside.pop()
        elif line:
            yield from _unknown_directive(inside, name)
            if not line.endswith(";"):
                yield f"without a semicolon: {line}"
    if inside:
        yield f"{inside[-1]} is not closed"
    for needed in ("proxy_pass http://127.0.0.1:8642;", "proxy_set_header Host $host;", "proxy_buffering off;"):
        if needed not in text:
            yield f"lacks {needed}"


def _unknown_directive(inside: list[str], name: str) -> Iterator[str]:
    known = NGINX[inside[-1]] if inside else {"server"}
    if name not in known:
        yield f"unknown directive {name}"


def dockerfile(text: str) -> Iterator[str]:
    """Yield what is wrong with a Dockerfile."""
    for line in text.splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "RUN":
            yield from problems(rest)
        elif instruction == "CMD":
            command: list[str] = json.loads(rest)
            yield from problems(" ".join(command))
            if command[2] not in {"app.py:graph"} or "COPY app.py " not in text:
                yield "CMD serves what was not copied"
        elif instruction == "FROM":
            if not re.fullmatch(r"python:3\.1[1-9]-slim", rest):
                yield f"FROM {rest}: not a Python that is supported"
        elif instruction not in {"USER", "COPY", "WORKDIR"}:
            yield f"unknown instruction {instruction}"


def yaml(text: str) -> Iterator[str]:
    """Yield what is wrong with a compose file, or with a configuration of Prometheus."""
    document: Mapping[str, Any] = yaml_load(text)
    if set(document) == {"services"}:
        yield from _compose(document["services"])
    elif set(document) == {"scrape_configs"}:
        for job in document["scrape_configs"]:
            keys = {"job_name", "authorization", "static_configs"}
            if set(job) != keys or "credentials_file" not in job["authorization"]:
                yield f"job {job}: /metrics needs the token of an admin, in a file"
            if any(not target.endswith(":8642") for config in job["static_configs"] for target in config["targets"]):
                yield f"job {job}: not the port of a server"
    else:
        yield f"neither a compose file nor a configuration of Prometheus: {', '.join(document)}"


def _compose(services: Mapping[str, Any]) -> Iterator[str]:
    for name, service in services.items():
        yield from (f"{name}: unknown key {key}" for key in set(service) - {"image", "command", "environment"})
        if "command" in service:
            yield from problems(service["command"])
        for variable, value in service.get("environment", {}).items():
            if variable.startswith("PENSTOCK_"):
                yield from unknown_variables(variable)
                host = re.search(r"//(?:[^@/]*@)?([\w.-]+)", value)
                if host is not None and host[1] not in services:
                    yield f"{name}: {variable} names {host[1]}, which is no service"


def graph(text: str) -> Iterator[str]:
    """Yield what is wrong with a graph in JSON."""
    try:
        parse_graph(text)
    except GraphInvalid as wrong:
        yield str(wrong)


def unknown_variables(*names: str) -> Iterator[str]:
    """Yield the variables of ours that nothing reads."""
    known = {name for name, _, _ in variables()}
    yield from (f"unknown variable {name}" for name in names if name not in known)


CHECKS: Mapping[str, Callable[[str], Iterator[str]]] = {
    "ini": systemd,
    "nginx": nginx,
    "dockerfile": dockerfile,
    "yaml": yaml,
    "json": graph,
}
"""By kind of block."""
BLOCKS = [block for path in PAGES for block in blocks_of(path) if block.kind in CHECKS]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_configuration_names_what_there_is(block: Block) -> None:
    assert list(CHECKS[block.kind](block.text)) == []


@pytest.mark.parametrize(
    ("kind", "old", "new", "problem"),
    [
        ("ini", "--cost-ceiling", "--max-ceiling", "No such option"),
        ("ini", "penstock worker", "penstock work", "No such command"),
        ("ini", "PENSTOCK_ENGINE", "PENSTOCK_ENGINES", "unknown variable PENSTOCK_ENGINES"),
        ("ini", "Restart=", "Restarts=", "unknown: [Service] Restarts"),
        ("ini", "TimeoutStopSec=60", "TimeoutStopSec=30", "not longer than --drain"),
        ("nginx", "proxy_buffering off", "proxy_buffer off", "unknown directive proxy_buffer"),
        ("nginx", "8642;", "8642", "without a semicolon"),
        ("nginx", "127.0.0.1:8642", "127.0.0.1:8080", "lacks proxy_pass"),
        ("dockerfile", '"--host"', '"--address"', "No such option"),
        ("dockerfile", "[server,postgres,prices]", "[server,postgre]", "no extra postgre"),
        ("dockerfile", "COPY app.py", "COPY main.py", "was not copied"),
        ("yaml", "--tokens", "--token", "No such option"),
        ("yaml", "PENSTOCK_DB:", "PENSTOCK_DATABASE:", "unknown variable PENSTOCK_DATABASE"),
        ("yaml", "@db/", "@database/", "names database, which is no service"),
        ("yaml", "credentials_file", "credentials", "needs the token of an admin"),
        ("json", '"edges"', '"edge"', "edge"),
    ],
)
def test_a_wrong_configuration_is_found(kind: str, old: str, new: str, problem: str) -> None:
    (block,) = [block for block in BLOCKS if block.kind == kind and old in block.text][:1]
    assert problem in " ".join(CHECKS[kind](block.text.replace(old, new)))
