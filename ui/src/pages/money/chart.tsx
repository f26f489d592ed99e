// Cost by day as bars. The table below the chart has the same figures as text.

import { formatUsd } from "../../model/money.ts";
import { bars, ticks, type DayCost } from "./model.ts";

const WIDTH = 960;
const HEIGHT = 190;
const LEFT = 74;
const BOTTOM = 24;
const TOP = 12;

export function DayChart({ days }: { days: DayCost[] }) {
  const most = Math.max(...days.map((day) => day.nanos), 0);
  const lines = ticks(most);
  const top = lines.at(-1) || 1; // no day may have cost anything
  const height = HEIGHT - TOP - BOTTOM;
  const y = (nanos: number) => TOP + height * (1 - nanos / top);
  const shown = bars(days.length, WIDTH - LEFT);
  const every = Math.ceil(days.length / 10);
  const total = days.reduce((sum, day) => sum + day.nanos, 0);
  return (
    <svg className="chart" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Cost by day: ${formatUsd(total)} in ${days.length} days, ${formatUsd(most)} on the dearest`}>
      {lines.map((nanos) => (
        <g key={nanos}>
          <line className="grid" x1={LEFT} x2={WIDTH} y1={y(nanos)} y2={y(nanos)} />
          <text className="label" x={LEFT - 8} y={y(nanos) + 4} textAnchor="end">
            {formatUsd(nanos)}
          </text>
        </g>
      ))}
      {days.map((day, at) => (
        <g key={day.day}>
          <rect className="bar-of-day" x={LEFT + shown.x(at)} width={shown.width} y={y(day.nanos)} height={Math.max(day.nanos ? 1 : 0, y(0) - y(day.nanos))}>
            <title>{`${day.day}: ${day.unknown ? "at least " : ""}${formatUsd(day.nanos)}`}</title>
          </rect>
          {day.unknown > 0 && (
            <text className="label at-least" x={LEFT + shown.x(at) + shown.width / 2} y={y(day.nanos) - 3} textAnchor="middle">
              ≥
            </text>
          )}
          {at % every === 0 && (
            <text className="label" x={LEFT + shown.x(at) + shown.width / 2} y={HEIGHT - 6} textAnchor="middle">
              {day.day.slice(5)}
            </text>
          )}
        </g>
      ))}
    </svg>
  );
}
