// What runs cost: by day, model, graph, owner and node; today's budgets; gateway keys; prices in force.

import { useState } from "react";
import { get, query, serverNow } from "../../api/client.ts";
import type { DayBudgetShown, KeyRunList, MoneyShown, MoneySum, PriceList, PriceShown, TokenList, TokenShown } from "../../api/types.ts";
import { formatCount, formatPrice, formatUsd, several, toNanos } from "../../model/money.ts";
import { setParams } from "../../router.ts";
import { Dialog, Failure, Meter, Money, Track, usePolled, type Level } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import type { PageProps } from "../index.ts";
import { useBudgets } from "../use-lists.ts";
import { DayChart } from "./chart.tsx";
import { dayOf, daysBefore, everyDay, untilReset } from "./model.ts";
import "./money.css";

const POLL_MS = 10_000;
const RANGES = [7, 30, 90, 365];
const GROUPS = { day: "Day", model: "Model", graph: "Graph", owner: "Owner", node: "Node" } as const;
type Group = keyof typeof GROUPS;

export default function MoneyPage({ route, me }: PageProps) {
  const isAdmin = me.role === "admin";
  const groups = (Object.keys(GROUPS) as Group[]).filter((name) => name !== "owner" || isAdmin);
  const by = groups.find((name) => name === route.params.get("by")) ?? "day";
  const range = RANGES.find((days) => String(days) === route.params.get("days")) ?? 30;
  const since = daysBefore(dayOf(serverNow()), range - 1);
  const path = `/api/money${query({ by, since })}`;
  const money = usePolled(path, (signal) => get<MoneyShown>(path, signal), POLL_MS);
  const found = money.value;
  return (
    <>
      <div className="bar">
        <h1>Money</h1>
        <span className="muted">{isAdmin ? "of all runs" : "of your runs"}</span>
        <span className="grow" />
        <div className="chips" role="group" aria-label="Days">
          {RANGES.map((days) => (
            <button key={days} aria-pressed={days === range} onClick={() => setParams(route, { days: days === 30 ? null : String(days) })}>
              {days === 365 ? "A year" : `${days} days`}
            </button>
          ))}
        </div>
      </div>
      <Failure error={money.error} />
      {found && <Totals of={found} />}
      <Budgets isAdmin={isAdmin} />
      <section className="panel" aria-label="Costs">
        <header>
          <h2>Costs</h2>
          <span className="grow" />
          <div className="chips" role="group" aria-label="Costs by">
            {groups.map((name) => (
              <button key={name} aria-pressed={name === by} onClick={() => setParams(route, { by: name === "day" ? null : name })}>
                {GROUPS[name]}
              </button>
            ))}
          </div>
        </header>
        {found ? <Sums of={found} by={by} /> : <p className="empty">{money.error ? "Nothing to show." : "Loading…"}</p>}
      </section>
      {isAdmin && <Keys />}
      <Prices />
    </>
  );
}

function Totals({ of: { total, in_progress, unresolved } }: { of: MoneyShown }) {
  return (
    <dl className="totals panel">
      <div>
        <dt>Cost</dt>
        <dd className="figure">
          <Money nanos={total.cost_nanos} unknown={total.unknown_costs > 0} />
        </dd>
        {total.unknown_costs > 0 && (
          <dd className="small">
            at least: <a href="#/bills?state=unknown">{several(total.unknown_costs, "call")} of unknown cost</a>
          </dd>
        )}
      </div>
      <div>
        <dt>In progress</dt>
        <dd className="figure">{formatUsd(toNanos(in_progress.spent_usd))}</dd>
        <dd className="small muted">
          {several(in_progress.runs, "run")}, {formatUsd(toNanos(in_progress.held_usd))} held
        </dd>
      </div>
      <div>
        <dt>Unresolved</dt>
        <dd className="figure">{formatUsd(toNanos(unresolved.held_usd))}</dd>
        <dd className="small">{unresolved.runs > 0 ? <a href="#/bills">{several(unresolved.runs, "run")} with open bills</a> : <span className="muted">no open bills</span>}</dd>
      </div>
      <div>
        <dt>Runs</dt>
        <dd className="figure">{formatCount(total.runs ?? 0)}</dd>
        <dd className="small muted">{several(total.calls, "model call")}</dd>
      </div>
      <div>
        <dt>Tokens</dt>
        <dd className="figure">{formatCount(total.tokens_in + total.tokens_out)}</dd>
        <dd className="small muted">
          {formatCount(total.tokens_in)} in, {formatCount(total.tokens_out)} out
        </dd>
      </div>
    </dl>
  );
}

function Sums({ of: found, by }: { of: MoneyShown; by: Group }) {
  if (!found.sums.length) return <p className="empty">Nothing was spent in these days.</p>;
  const most = Math.max(...found.sums.map((sum) => sum.cost_nanos), 1);
  const rows = [...found.sums].sort((a, b) => (by === "day" ? (a.day! < b.day! ? 1 : -1) : b.cost_nanos - a.cost_nanos));
  return (
    <>
      {by === "day" && <DayChart days={everyDay(found.since, found.until, found.sums)} />}
      <div className="scroll" tabIndex={0} role="region" aria-label={`Costs by ${by}`}>
        <table>
          <thead>
            <tr>
              <th scope="col">{GROUPS[by]}</th>
              <th scope="col">
                <span className="hidden">Share</span>
              </th>
              <th scope="col" className="number">
                Cost
              </th>
              {rows[0]!.runs !== null && (
                <th scope="col" className="number">
                  Runs
                </th>
              )}
              <th scope="col" className="number">
                Model calls
              </th>
              <th scope="col" className="number">
                Tokens in
              </th>
              <th scope="col" className="number">
                Tokens out
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map((sum) => (
              <tr key={`${sum.day} ${sum.model} ${sum.graph_id} ${sum.owner} ${sum.node}`}>
                <th scope="row" className="row">
                  <Name of={sum} by={by} />
                </th>
                <td className="wide">
                  <span className="share" aria-hidden="true">
                    <span style={{ width: `${(100 * sum.cost_nanos) / most}%` }} />
                  </span>
                </td>
                <td className="number">
                  <Money nanos={sum.cost_nanos} unknown={sum.unknown_costs > 0} />
                </td>
                {sum.runs !== null && <td className="number">{formatCount(sum.runs)}</td>}
                <td className="number">{formatCount(sum.calls)}</td>
                <td className="number">{formatCount(sum.tokens_in)}</td>
                <td className="number">{formatCount(sum.tokens_out)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p className="pad muted small">
        Days are in UTC. A run counts on the day it was submitted, with the cost recorded at its end.
        {found.is_truncated && " There are more rows than are shown; the totals have all of them."}
      </p>
    </>
  );
}

function Name({ of: sum, by }: { of: MoneySum; by: Group }) {
  if (by === "graph") return <a href={`#/runs?graph=${encodeURIComponent(sum.graph_id!)}`}>{visible(sum.graph_id!)}</a>;
  if (by === "node")
    return (
      <>
        {sum.node ? visible(sum.node) : <span className="muted">the run as a whole</span>} <span className="muted small">{visible(sum.graph_id!)}</span>
      </>
    );
  if (by === "model") return sum.model ? <>{visible(sum.model)}</> : <span className="muted">no model: tools, or not known</span>;
  return <>{visible((by === "day" ? sum.day : sum.owner) ?? "")}</>;
}

const WHOSE: Record<DayBudgetShown["level"], (name: string) => string> = {
  all: () => "All users together",
  team: (name) => `Team ${name}`,
  owner: (name) => visible(name),
};

function Budgets({ isAdmin }: { isAdmin: boolean }) {
  const budgets = useBudgets();
  const found = budgets.value;
  const levels = found?.budgets.map(
    (one): Level => ({
      name: WHOSE[one.level](one.name),
      spent: toNanos(one.spent_usd),
      held: toNanos(one.held_usd),
      unresolved: toNanos(one.unresolved_usd),
      limit: one.limit_usd === null ? null : toNanos(one.limit_usd),
      format: formatUsd,
      tripped: one.left_usd !== null && one.left_usd <= 0,
    }),
  );
  return (
    <section className="panel" aria-label="Budgets of today">
      <header>
        <h2>Budgets of today</h2>
        {found && (
          <span className="muted small">
            reset {untilReset(found.now_ms, found.resets_ms)}, at {new Date(found.resets_ms).toISOString().slice(11, 16)} UTC ({new Date(found.resets_ms).toLocaleTimeString(undefined, { timeStyle: "short" })} here)
          </span>
        )}
      </header>
      <Failure error={budgets.error} />
      {levels?.length === 0 && (
        <p className="empty">
          {isAdmin ? (
            <span>
              There is no daily budget: a day may cost any amount. Start the server with <code>--daily 20</code> or <code>--user-daily 2</code>.
            </span>
          ) : (
            "There is no daily budget. Each run has limits of its own."
          )}
        </p>
      )}
      {levels && levels.length > 0 && (
        <div className="strip pad">
          {levels.map((level) => (
            <Meter key={level.name} level={level} />
          ))}
        </div>
      )}
    </section>
  );
}

/** What each run of a gateway key has used today. */
function KeyRuns({ id, name, onClose }: { id: string; name: string; onClose: () => void }) {
  const path = `/api/tokens/${encodeURIComponent(id)}/runs`;
  const found = usePolled(path, (signal) => get<KeyRunList>(path, signal), POLL_MS);
  return (
    <Dialog title={`Runs of ${visible(name)} today`} onClose={onClose}>
      <Failure error={found.error} />
      {found.value?.runs.length === 0 && <p className="muted">No requests yet.</p>}
      {found.value && found.value.runs.length > 0 && (
        <table>
          <thead>
            <tr>
              <th scope="col">Run</th>
              <th scope="col" className="number">
                Calls
              </th>
              <th scope="col" className="number">
                Tokens
              </th>
              <th scope="col" className="number">
                Spent
              </th>
              <th scope="col" className="number">
                Held
              </th>
            </tr>
          </thead>
          <tbody>
            {found.value.runs.map((run) => (
              <tr key={run.run}>
                <th scope="row" className="row mono">
                  {visible(run.run)}
                </th>
                <td className="number">{formatCount(run.api_calls)}</td>
                <td className="number">
                  {formatCount(run.tokens_in)} → {formatCount(run.tokens_out)}
                </td>
                <td className="number">{formatUsd(toNanos(run.spent_usd))}</td>
                <td className="number">{formatUsd(toNanos(run.held_usd + run.unresolved_usd))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {found.value?.next && <p className="muted small">Only the first {found.value.runs.length}; penstock tokens runs {id} lists all.</p>}
      <div className="bar">
        <button onClick={onClose}>Close</button>
      </div>
    </Dialog>
  );
}

function Keys() {
  const [shown, setShown] = useState<TokenShown | null>(null);
  const keys = usePolled("keys", (signal) => get<TokenList>("/api/tokens?kind=gateway&limit=100", signal), POLL_MS);
  const active = keys.value?.tokens.filter((key) => key.state === "active" && key.gateway);
  if (!active?.length) return null;
  return (
    <section className="panel" aria-label="Gateway keys">
      <header>
        <h2>Gateway keys today</h2>
        <span className="muted small">
          spent through the gateway, in runs of its own; <a href="#/admin/tokens">create and revoke keys</a>
        </span>
      </header>
      <table>
        <thead>
          <tr>
            <th scope="col">Key</th>
            <th scope="col">Used of its budget</th>
            <th scope="col" className="number">
              Spent
            </th>
            <th scope="col" className="number">
              Held
            </th>
            <th scope="col" className="number">
              Left
            </th>
            <th scope="col" className="number">
              Calls
            </th>
          </tr>
        </thead>
        <tbody>
          {active.map((key) => {
            const { id, name, gateway } = key;
            const today = gateway!.today;
            const limit = today?.limit_usd ?? null;
            return (
              <tr key={id}>
                <th scope="row" className="row">
                  {visible(name)} <span className="muted small mono">{id}</span>
                  {gateway!.team && <div className="muted small">team {visible(gateway!.team)}</div>}
                </th>
                <td className="wide">
                  {today && limit !== null ? (
                    <Track
                      thin
                      name={`Budget of ${name}, ${id}`}
                      spent={toNanos(today.spent_usd)}
                      held={toNanos(today.held_usd)}
                      unresolved={toNanos(today.unresolved_usd)}
                      limit={toNanos(limit)}
                      format={formatUsd}
                    />
                  ) : (
                    <span className="muted">{today ? "no budget of its own" : "the ledger does not answer"}</span>
                  )}
                </td>
                <td className="number">{today ? formatUsd(toNanos(today.spent_usd)) : ""}</td>
                <td className="number">{today ? formatUsd(toNanos(today.held_usd + today.unresolved_usd)) : ""}</td>
                <td className="number">{today?.left_usd == null ? "–" : formatUsd(toNanos(today.left_usd))}</td>
                <td className="number">
                  {today ? formatCount(today.api_calls) : ""}{" "}
                  <button onClick={() => setShown(key)} aria-label={`Runs of ${visible(name)}, ${id}`}>
                    Runs
                  </button>
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {shown && <KeyRuns id={shown.id} name={shown.name} onClose={() => setShown(null)} />}
    </section>
  );
}

const SOURCES: Record<PriceShown["source"], string> = {
  registered: "set by the operator",
  "genai-prices": "price table",
  assumed: "assumed upper bound",
  unknown: "no price",
  reported: "reported by the provider",
};

const WITHOUT_PRICE: Record<PriceList["unknown"], string> = {
  refuse: "Calls of models without a price are refused.",
  assume: "Calls of models without a price are charged an assumed upper bound.",
  count: "Calls of models without a price are sent, and counted as of unknown cost.",
};

function Prices() {
  const prices = usePolled("prices", (signal) => get<PriceList>("/api/prices", signal), 60_000);
  return (
    <section className="panel" aria-label="Prices in force">
      <header>
        <h2>Prices in force</h2>
        <span className="muted small">US dollars per million tokens{prices.value && `. ${WITHOUT_PRICE[prices.value.unknown]}`}</span>
      </header>
      <Failure error={prices.error} />
      {prices.value && !prices.value.prices.length && <p className="empty">No models are offered, and none were used in the last 30 days.</p>}
      {prices.value && prices.value.prices.length > 0 && (
        <table>
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Offered as</th>
              <th scope="col">Price from</th>
              <th scope="col" className="number">
                Input
              </th>
              <th scope="col" className="number">
                From cache
              </th>
              <th scope="col" className="number">
                Output
              </th>
            </tr>
          </thead>
          <tbody>
            {prices.value.prices.map((price) => (
              <tr key={price.model}>
                <th scope="row" className="row">
                  {visible(price.model)}
                </th>
                <td>{price.offered_as.map(visible).join(", ") || <span className="muted">used in the last 30 days</span>}</td>
                <td className={price.source === "unknown" ? "warned" : ""}>
                  {SOURCES[price.source]}
                  {price.has_tiers && <span className="muted small"> more for long input</span>}
                </td>
                <td className="number">{formatPrice(price.input_usd_per_mtok)}</td>
                <td className="number">{formatPrice(price.cached_input_usd_per_mtok)}</td>
                <td className="number">{formatPrice(price.output_usd_per_mtok)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}
