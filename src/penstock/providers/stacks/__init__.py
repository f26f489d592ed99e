"""The HTTP libraries whose requests are contained, one module each."""

from __future__ import annotations

from penstock.providers.hooks import Patch
from penstock.providers.stacks import httpx

PATCHES: tuple[Patch, ...] = (*httpx.PATCHES,)
