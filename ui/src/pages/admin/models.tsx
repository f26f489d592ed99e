// The models that graphs can name: what they cost, whether their keys are set, and which graphs name them.

import { get } from "../../api/client.ts";
import type { Checkup, ModelShown, MoneyShown, OfferedModels } from "../../api/types.ts";
import { formatCount, formatPrice, toNanos } from "../../model/money.ts";
import { Failure, Money, Status, usePolled } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";

const KEY = /_API_KEY$/;
const KEYS = {
  set: <Status of="completed" word="set" />,
  missing: <Status of="failed" word="missing" />,
  none: <span className="muted">none needed</span>,
};
const LINKED = 3;

export function Models() {
  const models = usePolled("models", (signal) => get<OfferedModels>("/api/models", signal), 0);
  const used = usePolled("used", (signal) => get<MoneyShown>("/api/money?by=model", signal), 0);
  const checkup = usePolled("doctor", (signal) => get<Checkup>("/api/doctor", signal), 0);
  const sums = new Map(used.value?.sums.map((one) => [one.model, one]));
  const keys = checkup.value?.findings.filter((one) => KEY.test(one.name));
  return (
    <>
      <Failure error={models.error ?? used.error ?? checkup.error} />
      <section className="panel" aria-label="Models that graphs can name">
        <header>
          <h2>Models that graphs can name</h2>
          <span className="muted small">prices in US dollars per million tokens; use in the last 30 days</span>
        </header>
        {models.value?.models.length === 0 ? (
          <p className="empty">
            <span>
              None. Offer models with <code>--models my_models.py:models</code>, or name them in graphs, such as <code>openai:gpt-4o-mini</code>.
            </span>
          </p>
        ) : (
          <table className="models">
            <thead>
              <tr>
                <th scope="col">Model</th>
                <th scope="col">Provider</th>
                <th scope="col">Key</th>
                <th scope="col">Price</th>
                <th scope="col" className="number">
                  Input
                </th>
                <th scope="col" className="number">
                  From cache
                </th>
                <th scope="col" className="number">
                  Output
                </th>
                <th scope="col">Used by</th>
                <th scope="col" className="number">
                  Calls
                </th>
                <th scope="col" className="number">
                  Cost
                </th>
              </tr>
            </thead>
            <tbody>
              {models.value?.models.map(({ id, model, provider, key, price, graphs, used_by }) => (
                <tr key={id}>
                  <th scope="row" className="row mono">
                    {visible(id)}
                    {!id.endsWith(model) && <span className="muted small"> {visible(model)}</span>}
                  </th>
                  <td>{provider ? visible(provider) : <span className="muted">of this server</span>}</td>
                  <td>{KEYS[key ?? "none"]}</td>
                  <td>
                    <Known price={price} />
                  </td>
                  <td className="number">{formatPrice(price?.input_usd_per_mtok)}</td>
                  <td className="number">{formatPrice(price?.cached_input_usd_per_mtok)}</td>
                  <td className="number">{formatPrice(price?.output_usd_per_mtok)}</td>
                  <td>
                    <UsedBy graphs={graphs} shown={used_by} />
                  </td>
                  <td className="number">{formatCount(sums.get(model)?.calls ?? 0)}</td>
                  <td className="number">
                    <Money nanos={toNanos(sums.get(model)?.cost_usd ?? 0)} unknown={(sums.get(model)?.unknown_costs ?? 0) > 0} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        )}
      </section>
      <section className="panel" aria-label="Keys of providers">
        <header>
          <h2>Keys of providers</h2>
          <span className="muted small">in the environment of the server; never shown</span>
        </header>
        <table>
          <thead>
            <tr>
              <th scope="col">Variable</th>
              <th scope="col">State</th>
              <th scope="col">What to do</th>
            </tr>
          </thead>
          <tbody>
            {keys?.map((one) => (
              <tr key={one.name}>
                <th scope="row" className="row mono">
                  {one.name}
                </th>
                <td>{one.state === "ok" ? <Status of="completed" word="set" /> : <Status of="skipped" word={one.found} />}</td>
                <td>{one.advice && <code>{one.advice}</code>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    </>
  );
}

function Known({ price }: { price: ModelShown["price"] }) {
  if (!price) return <Status of="halted" word="not known" />;
  if (price.source === "assumed") return <Status of="waiting" word="assumed" />;
  return (
    <>
      <Status of="completed" word="known" />
      {price.has_tiers && <span className="muted small"> more for long input</span>}
    </>
  );
}

/** The first graphs that name a model, and how many more do. */
function UsedBy({ graphs, shown }: { graphs: number; shown: ModelShown["used_by"] }) {
  if (!graphs) return <span className="muted">no graph</span>;
  const linked = shown.slice(0, LINKED);
  return (
    <span className="used">
      {linked.map((graph, at) => (
        <span key={graph.id}>
          <a href={`#/graphs/${encodeURIComponent(graph.id)}`} title={`${visible(graph.name)}, version ${graph.version}`}>
            {visible(graph.id)}
          </a>
          {at < linked.length - 1 && ", "}
        </span>
      ))}
      {graphs > linked.length && <span className="muted small"> and {formatCount(graphs - linked.length)} more</span>}
    </span>
  );
}
