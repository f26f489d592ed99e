"""The upstreams that the environment and the command line declare, for `exec`, `gateway`, `serve` and `doctor`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.cli.exits import Refused
from penstock.errors import InvalidValue
from penstock.gateway.upstreams import Upstream, parse_upstream, upstreams_in


def declared_upstreams(named: Sequence[str]) -> dict[str, Upstream]:
    """Return the upstreams by name; `named` are those of `--upstream`. Refused if one cannot be used."""
    try:
        given = [parse_upstream(text, os.environ) for text in named]
        return upstreams_in(os.environ) | {upstream.name: upstream for upstream in given}
    except InvalidValue as invalid:
        raise Refused(str(invalid)) from None
