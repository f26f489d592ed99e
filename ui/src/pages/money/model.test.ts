import assert from "node:assert/strict";
import { test } from "node:test";
import type { MoneySum } from "../../api/types.ts";
import { formatBytes } from "../../model/money.ts";
import { bars, daysBefore, everyDay, ticks, untilReset } from "./model.ts";

const sum = (day: string, nanos: number, unknown = 0): MoneySum => ({
  day,
  runs: 1,
  calls: 1,
  cost_usd: nanos / 1e9,
  cost_nanos: nanos,
  tokens_in: 0,
  tokens_out: 0,
  unknown_costs: unknown,
});

test("a range has every day, also over the end of a month and a leap day", () => {
  const days = everyDay("2028-02-27", "2028-03-01", [sum("2028-02-29", 5, 1)]);
  assert.deepEqual(days.map((day) => day.day), ["2028-02-27", "2028-02-28", "2028-02-29", "2028-03-01"]);
  assert.deepEqual(days.map((day) => day.nanos), [0, 0, 5, 0]);
  assert.equal(days[2]!.unknown, 1);
});

test("one day is a range too", () => {
  assert.equal(everyDay("2026-11-18", "2026-11-18", []).length, 1);
  assert.equal(daysBefore("2026-03-01", 1), "2026-02-28");
});

test("the lines of the chart are round, few, and reach the highest bar", () => {
  for (let exponent = 0; exponent < 12; exponent += 1) {
    for (const digits of [1, 1.01, 1.9, 2, 2.51, 4.9, 5, 7.3, 9.99]) {
      const most = Math.max(4, digits * 10 ** exponent);
      const lines = ticks(most);
      assert.equal(lines[0], 0);
      assert.ok(lines.at(-1)! >= most * 0.999);
      assert.ok(lines.length <= 5);
      assert.ok(lines.at(-1)! <= most * 2.01);
    }
  }
  assert.deepEqual(ticks(0), [0]);
});

test("bars stay in the chart and do not overlap", () => {
  for (const count of [1, 7, 30, 90, 400]) {
    const shown = bars(count, 880);
    assert.ok(shown.x(0) >= 0);
    assert.ok(shown.x(count - 1) + shown.width <= 880.001);
    if (count > 1) assert.ok(shown.x(1) >= shown.x(0) + shown.width);
  }
});

test("the time to the reset is in hours and minutes", () => {
  assert.equal(untilReset(0, 3 * 3_600_000 + 12 * 60_000), "in 3 h 12 min");
  assert.equal(untilReset(0, 30_000), "in 1 min");
  assert.equal(untilReset(5, 0), "in 1 min");
});

test("sizes have a unit that fits", () => {
  assert.deepEqual([0, 999, 1_000, 45_600, 20_000_000, 3_210_000_000].map(formatBytes), ["0 bytes", "999 bytes", "1.0 kB", "45.6 kB", "20.0 MB", "3.2 GB"]);
});
