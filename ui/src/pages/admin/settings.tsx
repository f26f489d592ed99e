// The settings in force, and the option that changes each at the next start.

import { get } from "../../api/client.ts";
import type { Setting, SettingList } from "../../api/types.ts";
import { formatBytes, formatCount, formatDuration, formatUsd, toNanos } from "../../model/money.ts";
import { Failure, usePolled } from "../../ui/parts.tsx";
import { visible } from "../../ui/visible.ts";
import { LIMITS, type LimitName } from "../limits.tsx";

const SECTIONS: Record<Setting["section"], string> = {
  money: "Money and limits",
  runs: "Runs",
  storage: "Storage",
  access: "Access",
  requests: "Requests",
};

export function Settings() {
  const settings = usePolled("settings", (signal) => get<SettingList>("/api/settings", signal), 0);
  return (
    <>
      <p className="muted">What this server was started with. To change a setting, restart the server with the option beside it.</p>
      <Failure error={settings.error} />
      {settings.value &&
        (Object.keys(SECTIONS) as Setting["section"][]).map((section) => (
          <section key={section} className="panel" aria-label={SECTIONS[section]}>
            <header>
              <h2>{SECTIONS[section]}</h2>
            </header>
            <table className="settings">
              <thead>
                <tr>
                  <th scope="col">Setting</th>
                  <th scope="col">Value</th>
                  <th scope="col">Changed by</th>
                </tr>
              </thead>
              <tbody>
                {settings.value!.settings
                  .filter((one) => one.section === section)
                  .map((one) => (
                    <tr key={one.name}>
                      <th scope="row" className="row">
                        {one.title}
                      </th>
                      <td className="found">
                        {shown(one)} {!one.is_default && <span className="changed">changed</span>}
                      </td>
                      <td>{one.option ? <code>{one.option}</code> : <span className="muted">code only</span>}</td>
                    </tr>
                  ))}
              </tbody>
            </table>
          </section>
        ))}
    </>
  );
}

function shown({ name, value, unit }: Setting): string {
  if (value === null) return "none";
  if (Array.isArray(value)) return value.map((one) => visible(String(one))).join(", ") || "none";
  if (typeof value === "object") {
    const limits = Object.entries(value as Record<string, unknown>);
    return limits.map(([limit, amount]) => `${LIMITS[limit as LimitName] ?? limit}: ${String(amount)}`).join("; ") || "none";
  }
  if (unit === "usd") return formatUsd(toNanos(value));
  if (unit === "bytes") return formatBytes(Number(value));
  if (unit === "seconds") return formatDuration(1_000 * Number(value));
  if (unit === "days") return `${String(value)} days`;
  if (typeof value === "boolean") return value ? "on" : "off";
  if (name === "port" || typeof value !== "number") return visible(String(value)) || "none";
  return formatCount(value);
}
