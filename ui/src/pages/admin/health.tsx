// Whether the server works: its stores, its figures, the servers beside it, and its installation.

import { get } from "../../api/client.ts";
import type { Checkup, FindingShown, HostShown, Readiness } from "../../api/types.ts";
import { formatBytes, formatCount, formatDuration, several } from "../../model/money.ts";
import { Failure, Status, usePolled, when } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";

const POLL_MS = 5_000;
const WORDS: Record<FindingShown["state"], [string, string]> = {
  ok: ["completed", "fine"],
  missing: ["skipped", "not there"],
  broken: ["failed", "broken"],
};
const ORDER: FindingShown["state"][] = ["broken", "missing", "ok"];

export function Health() {
  const ready = usePolled("ready", (signal) => get<Readiness>("/ready", signal), POLL_MS);
  const host = usePolled("host", (signal) => get<HostShown>("/api/host", signal), POLL_MS);
  const checkup = usePolled("doctor", (signal) => get<Checkup>("/api/doctor", signal), 0);
  const findings = checkup.value && [...checkup.value.findings].sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state));
  return (
    <>
      <Failure error={ready.error} />
      {ready.value && <Ready of={ready.value} />}
      <Failure error={host.error} />
      {host.value && <Figures of={host.value} />}
      <section className="panel" aria-label="Checks">
        <header>
          <h2>Checks</h2>
          <span className="muted small">
            as <code>penstock doctor</code> makes them
          </span>
          <span className="grow" />
          <button onClick={checkup.again}>Check again</button>
        </header>
        <Failure error={checkup.error} />
        <table className="checks">
          <thead>
            <tr>
              <th scope="col">What</th>
              <th scope="col">State</th>
              <th scope="col">Found</th>
              <th scope="col">What to do</th>
            </tr>
          </thead>
          <tbody>
            {findings?.map((one) => (
              <tr key={one.name}>
                <th scope="row" className="row">
                  {one.name}
                </th>
                <td>
                  <Status of={WORDS[one.state][0]} word={WORDS[one.state][1]} />
                </td>
                <td className="found">{visible(one.found)}</td>
                <td>{one.advice && <code>{visible(one.advice)}</code>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    </>
  );
}

function Ready({ of: { status, rows } }: { of: Readiness }) {
  if (status === "ready")
    return (
      <div className="note ok" role="status">
        The server is ready: its database and its ledger can be read and written.
      </div>
    );
  return (
    <div className="note warn" role="status">
      The server works, but some stored rows cannot be read:
      <ul>
        {rows?.map((row) => (
          <li key={`${row.table} ${row.key}`}>
            <span className="mono">
              {row.table} {visible(row.key)}
            </span>
            : {visible(row.why)}
          </li>
        ))}
      </ul>
    </div>
  );
}

function Figures({ of: host }: { of: HostShown }) {
  const { database, totals } = host;
  const ended = ["completed", "failed", "halted", "cancelled"].reduce((sum, name) => sum + (totals[name] ?? 0), 0);
  const facts: [string, string][] = [
    ["Running", `${several(host.running, "run")}, ${formatCount(host.waiting)} waiting for people`],
    ["Queued", `${several(host.queued, "run")}, on all servers`],
    ["Ended since the start", several(ended, "run")],
    ["Open streams", formatCount(host.streams)],
    ["Processor time", formatDuration(host.cpu_s * 1_000)],
    ["Memory, at most", host.max_memory_bytes === null ? "not known" : formatBytes(host.max_memory_bytes)],
    ["Database", `${visible(database.url)}, version ${database.version}`],
    ["Its size", database.size_bytes === null ? "in memory" : formatBytes(database.size_bytes)],
  ];
  return (
    <div className="columns">
      <section className="panel" aria-label="Figures of this server">
        <header>
          <h2>This server</h2>
          <span className="muted small mono">{visible(host.worker)}</span>
        </header>
        <dl className="facts pad">
          {facts.map(([name, value]) => (
            <div key={name} className="fact">
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      </section>
      <section className="panel" aria-label="Servers on this database">
        <header>
          <h2>Servers on this database</h2>
        </header>
        <table>
          <thead>
            <tr>
              <th scope="col">Server</th>
              <th scope="col" className="number">
                Runs
              </th>
              <th scope="col">Lease until</th>
            </tr>
          </thead>
          <tbody>
            {host.workers.map((worker) => (
              <tr key={worker.name}>
                <th scope="row" className="row mono">
                  {visible(worker.name)}
                  {worker.is_this && <span className="muted small"> this one</span>}
                </th>
                <td className="number">{formatCount(worker.runs)}</td>
                <td>
                  {worker.runs === 0 ? (
                    <span className="muted">no runs</span>
                  ) : worker.lease_until_ms < host.now_ms ? (
                    <Status of="failed" word="over: its runs are taken over" />
                  ) : (
                    when(worker.lease_until_ms)
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    </div>
  );
}
