"""Sixty-four threads, one ceiling.

Every thread calls the model as fast as it can until it is refused. Only the ledger coordinates them, and together
they spend what the provider's invoice has: not a cent over the ceiling.
"""

from __future__ import annotations

import sys
import threading

from penstock import ExecutionContext, Halted, Price, PriceBook, contain
from penstock.testing import Answer, FakeProvider

THREADS = 64
CEILING_USD = 1.00

client = FakeProvider(lambda number: Answer(input_tokens=1_000, output_tokens=100 + number % 400), latency_s=0.002)


def spend(run: ExecutionContext, start: threading.Barrier) -> None:
    """One thread's work: call until the ceiling says no."""
    worst_usd = client.worst_case_usd(input_tokens=1_000, max_tokens=500)
    start.wait()
    try:
        while True:
            run.llm(lambda: client.complete(max_tokens=500), cost_hint_usd=worst_usd)
    except Halted:
        return


with contain(max_cost_usd=CEILING_USD, prices=PriceBook(registered={client.model: Price(3, 15)})) as run:
    start = threading.Barrier(THREADS)
    threads = [threading.Thread(target=spend, args=(run, start)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

ledger, invoice = run.balance, client.invoice
print(f"{THREADS} threads under one ceiling of ${CEILING_USD:.2f}\n")
print("             calls        cost        held")
print(f"  invoice  {invoice.calls:>7}   ${invoice.total_usd:.6f}")
print(f"  ledger   {ledger.api_calls:>7}   ${ledger.spent_usd:.6f}   ${ledger.held_usd:.6f}")

holds = invoice.total_usd <= CEILING_USD and invoice.total_nanos == ledger.spent_nanos and ledger.held_nanos == 0
print(f"\n{'The ceiling held.' if holds else 'THE CEILING DID NOT HOLD.'}")
sys.exit(0 if holds else 1)
