"""A gateway on the stores of a server, as `penstock gateway` serves it, and `penstock serve --gateway` below a path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from penstock.gateway.app import Gateway
from penstock.gateway.connections import Connections
from penstock.gateway.key_runs import swept
from penstock.gateway.processes import Processes
from penstock.gateway.stored_keys import GatewaySettings, StoredKeys
from penstock.gateway.upstreams import Upstream
from penstock.runtime.billing.prices import PriceBook
from penstock.storage import Stores


@dataclass(frozen=True, slots=True)
class GatewayService:
    """The configuration of a gateway, which needs only stores in addition."""

    upstreams: Mapping[str, Upstream]
    prices: PriceBook
    settings: GatewaySettings = field(default_factory=GatewaySettings)

    @asynccontextmanager
    async def opened(self, stores: Stores) -> AsyncIterator[Gateway]:
        """Open a gateway on the stores; at the end of the block, settle the remaining calls."""
        keys = StoredKeys(stores.tokens, stores.ledger, self.prices, self.settings)
        processes = Processes(stores.ledger, keys.mark)
        past = swept(stores.ledger, self.settings.keep_days, self.settings.zone)
        async with aclosing(Connections()) as connections, processes.watched(), past, aclosing(keys):
            yield Gateway(self.upstreams, keys, connections)
