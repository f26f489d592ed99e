import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { exactUsd, formatDuration, formatUsd, priceWords, toNanos } from "./money.ts";

test("amounts have three significant digits, however small", () => {
  const shown = [0, 1, 5850, 19_950, 108_300, 47_700_000, 500_000_000, 1_234_567_000_000, -2_000_000_000].map(formatUsd);
  assert.deepEqual(shown, [
    "$0",
    "$0.000000001",
    "$0.00000585",
    "$0.00002",
    "$0.000108",
    "$0.0477",
    "$0.50",
    "$1,234.57",
    "−$2.00",
  ]);
});

test("the exact amount is never rounded", () => {
  assert.equal(exactUsd(19_950), "$0.00001995");
  assert.equal(exactUsd(1_000_000_000), "$1");
  fc.assert(fc.property(fc.nat(2 ** 40), (nanos) => toNanos(exactUsd(nanos).slice(1)) === nanos));
});

test("durations have at most two units", () => {
  const shown = [3, 1234, 59_000, 3_600_000, 3_725_000, 65_000].map(formatDuration);
  assert.deepEqual(shown, ["3 ms", "1.2 s", "59 s", "1 h", "1 h 2 min", "1 min 5 s"]);
});

test("a model to choose is described by its price, or by what it lacks", () => {
  const price = {
    source: "registered" as const,
    input_usd_per_mtok: 0.15,
    output_usd_per_mtok: 0.6,
    cached_input_usd_per_mtok: null,
    request_usd: 0,
    has_tiers: false,
  };
  assert.equal(priceWords({ price, key: "set" }), "$0.15 in, $0.60 out per million tokens");
  assert.equal(priceWords({ price: { ...price, source: "assumed" }, key: null }), "$0.15 in, $0.60 out per million tokens assumed");
  assert.equal(priceWords({ price: null, key: "missing" }), "no known price, no key");
});
