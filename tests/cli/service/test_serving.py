"""What a server does before it serves, in the process that serves."""

from __future__ import annotations

from penstock.cli.loading.offers import Given, Offers
from penstock.cli.service.keeping import Kept
from penstock.cli.service.serving import Loaded
from penstock.hosting.host import RunHost
from penstock.kernel.executor import ExecutorRegistry
from penstock.runtime.billing.prices import PriceBook
from penstock.storage.memory import MemoryStores


class Watched(PriceBook):
    """A list of prices that is imported when it is first asked for."""

    is_there = False

    @property
    def available(self) -> bool:
        self.is_there = True
        return True


async def keep_nothing(host: RunHost, given: list[Given]) -> Kept:
    return Kept()


async def test_the_first_call_does_not_wait_for_the_list_of_prices() -> None:
    prices = Watched()
    async with RunHost(MemoryStores(), executors=ExecutorRegistry()) as host:
        await Loaded([], keep_nothing, ExecutorRegistry(), Offers({}, prices)).begin(host)
    assert prices.is_there
