// The models that graphs can name, whether they have a price, and whether the keys of their providers are set.

import { get } from "../../api/client.ts";
import type { Checkup, MoneyShown, OfferedModels, PriceList } from "../../api/types.ts";
import { formatCount, formatPrice, toNanos } from "../../model/money.ts";
import { Failure, Money, Status, usePolled } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";

const KEY = /_API_KEY$/;

export function Models() {
  const models = usePolled("models", (signal) => get<OfferedModels>("/api/models", signal), 0);
  const prices = usePolled("prices", (signal) => get<PriceList>("/api/prices", signal), 0);
  const used = usePolled("used", (signal) => get<MoneyShown>("/api/money?by=model", signal), 0);
  const checkup = usePolled("doctor", (signal) => get<Checkup>("/api/doctor", signal), 0);
  const price = new Map(prices.value?.prices.map((one) => [one.model, one]));
  const sums = new Map(used.value?.sums.map((one) => [one.model, one]));
  const keys = checkup.value?.findings.filter((one) => KEY.test(one.name));
  return (
    <>
      <Failure error={models.error ?? prices.error ?? used.error ?? checkup.error} />
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
          <table>
            <thead>
              <tr>
                <th scope="col">Id</th>
                <th scope="col">Model</th>
                <th scope="col">Provider</th>
                <th scope="col">Price</th>
                <th scope="col" className="number">
                  Input
                </th>
                <th scope="col" className="number">
                  Output
                </th>
                <th scope="col" className="number">
                  Calls
                </th>
                <th scope="col" className="number">
                  Cost
                </th>
              </tr>
            </thead>
            <tbody>
              {models.value?.models.map(({ id, model, priced }) => (
                <tr key={id}>
                  <th scope="row" className="row mono">
                    {visible(id)}
                  </th>
                  <td className="mono">{visible(model)}</td>
                  <td>{price.get(model)?.provider ?? <span className="muted">of this server</span>}</td>
                  <td>{priced ? <Status of="completed" word="known" /> : <Status of="halted" word="not known" />}</td>
                  <td className="number">{formatPrice(price.get(model)?.input_usd_per_mtok)}</td>
                  <td className="number">{formatPrice(price.get(model)?.output_usd_per_mtok)}</td>
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
