// The flame of a run: every call as wide as the time, the money or the tokens that it and all below it took.
//
// It is drawn on one canvas, so that 50,000 calls stay quick. The arrow keys walk through it, and a table has the same
// figures as text.

import { useEffect, useMemo, useRef, useState, type KeyboardEvent, type MouseEvent, type WheelEvent } from "react";
import { serverNow } from "../../api/client.ts";
import type { CallTable } from "../../model/calls.ts";
import { flameOf, neighbour, paint, rowAt, type Flame, type Measure } from "../../model/flame.ts";
import { formatCount, formatDuration, formatUsd } from "../../model/money.ts";
import { isLive } from "../../model/run.ts";
import { setParams } from "../../router.ts";
import { visible } from "../../ui/visible.ts";
import { CallName } from "./rows.tsx";
import { useNow } from "./strip.tsx";
import { useColours, type Colours } from "./use-colours.ts";
import { Empty, Legend, type ViewProps } from "./views.tsx";

const LANE_PX = 21;
const MAX_HEIGHT_PX = 480;
const MIN_LABEL_PX = 28;
const TABLE_ROWS = 200;
const MEASURES: Record<Measure, string> = { time: "Time", money: "Money", tokens: "Tokens" };
const FORMATS: Record<Measure, (value: number) => string> = { time: formatDuration, money: formatUsd, tokens: formatCount };

interface Zoom {
  from: number;
  to: number;
}

const WHOLE: Zoom = { from: 0, to: 1 };

export default function FlameView(props: ViewProps) {
  const { table, state, route, atMs, picked, onPick } = props;
  const given = route.params.get("by") ?? "time";
  const measure: Measure = given in MEASURES ? (given as Measure) : "time";
  const asTable = route.params.get("as") === "table";
  const now = useNow(isLive(state.status));
  const slow = table.count > 5_000 ? Math.floor(now / 1000) : table.version; // a large flame is laid out once a second
  // eslint-disable-next-line -- the table changes in place, and its version with it
  const flame = useMemo(() => flameOf(table, measure, serverNow()), [table, slow, measure, isLive(state.status) && now]);
  if (table.count === 0) return <Empty {...props} />;
  return (
    <>
      <div className="bar pad-bar">
        <div className="chips" role="group" aria-label="What the width stands for">
          {Object.entries(MEASURES).map(([name, label]) => (
            <button key={name} aria-pressed={name === measure} onClick={() => setParams(route, { by: name === "time" ? null : name })}>
              {label}
            </button>
          ))}
        </div>
        <span className="muted small">
          {flame.total ? `${FORMATS[measure](flame.total)} in all` : ""}
        </span>
        <span className="grow" />
        <button aria-pressed={asTable} onClick={() => setParams(route, { as: asTable ? null : "table" })}>
          {asTable ? "Show the flame" : "Show as a table"}
        </button>
      </div>
      {flame.total === 0 ? (
        <p className="empty">{measure === "money" ? "Nothing has been paid for yet." : "No tokens have been used yet."}</p>
      ) : asTable ? (
        <Heaviest table={table} flame={flame} measure={measure} atMs={atMs} picked={picked} onPick={onPick} />
      ) : (
        <Drawing key={measure} table={table} flame={flame} measure={measure} atMs={atMs} picked={picked} onPick={onPick} />
      )}
    </>
  );
}

interface Drawn {
  table: CallTable;
  flame: Flame;
  measure: Measure;
  atMs: number | null;
  picked: string | null;
  onPick: (key: string) => void;
}

function Drawing({ table, flame, measure, atMs, picked, onPick }: Drawn) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const scroller = useRef<HTMLDivElement>(null);
  const colours = useColours();
  const [zoom, setZoom] = useState(WHOLE);
  const [width, setWidth] = useState(900);
  const [top, setTop] = useState(0);
  const [hovered, setHovered] = useState(-1);
  const pickedRow = picked ? table.rowOf(picked.slice(picked.indexOf(":") + 1)) : -1;
  // In a flame by money or tokens the width is no time.
  const moment = atMs === null || measure !== "time" ? null : (atMs - table.span()[0]) / flame.total;
  const height = Math.min(MAX_HEIGHT_PX, flame.lanes * LANE_PX + 2);

  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(200, Math.floor(entry!.contentRect.width))));
    observer.observe(scroller.current!);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const frame = requestAnimationFrame(() => draw(canvas.current!, { table, flame, zoom, width, height, top, picked: pickedRow, moment, colours }));
    return () => cancelAnimationFrame(frame);
  });

  const rowUnder = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const share = zoom.from + ((event.clientX - box.left) / width) * (zoom.to - zoom.from);
    const lane = Math.floor((event.clientY - box.top + top) / LANE_PX);
    return rowAt(table, flame, share, lane, (zoom.to - zoom.from) / width);
  };
  const zoomTo = (row: number) => setZoom(row < 0 ? WHOLE : within(flame.from[row]!, flame.to[row]!));
  const zoomBy = (factor: number, at = (zoom.from + zoom.to) / 2) =>
    setZoom(within(at - (at - zoom.from) * factor, at + (zoom.to - at) * factor));
  const pickRow = (row: number) => {
    if (row < 0) return;
    const call = table.call(row);
    if (call.key !== picked) onPick(call.key);
    const y = flame.lane[row]! * LANE_PX;
    if (y < top || y > top + height - LANE_PX) scroller.current!.scrollTop = y - height / 2;
    if (flame.to[row]! < zoom.from || flame.from[row]! > zoom.to) setZoom(WHOLE);
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { key } = event;
    if (key.startsWith("Arrow")) pickRow(pickedRow < 0 ? table.tree().order[0]! : neighbour(table, pickedRow, key));
    else if (key === "Enter") zoomTo(pickedRow);
    else if (key === "Escape" || key === "0") setZoom(WHOLE);
    else if (key === "+" || key === "=") zoomBy(0.5);
    else if (key === "-") zoomBy(2);
    else return;
    event.preventDefault();
  };
  const onWheel = (event: WheelEvent) => {
    if (!event.ctrlKey && !event.metaKey) return;
    const box = canvas.current!.getBoundingClientRect();
    zoomBy(event.deltaY > 0 ? 1.25 : 0.8, zoom.from + ((event.clientX - box.left) / width) * (zoom.to - zoom.from));
  };
  const said = hovered >= 0 && hovered < table.count ? hovered : pickedRow;
  return (
    <>
      <div className="bar pad-bar small">
        <button onClick={() => zoomBy(0.5)} aria-label="Zoom in">
          +
        </button>
        <button onClick={() => zoomBy(2)} aria-label="Zoom out" disabled={zoom === WHOLE}>
          −
        </button>
        <button onClick={() => setZoom(WHOLE)} disabled={zoom === WHOLE}>
          Whole run
        </button>
        <span className="muted">
          Arrow keys walk through the calls, Enter zooms to one, 0 shows the whole run.
        </span>
      </div>
      <div
        ref={scroller}
        className="flame"
        tabIndex={0}
        role="group"
        aria-label={`Flame of this run by ${MEASURES[measure].toLowerCase()}, ${table.count} calls`}
        style={{ height }}
        onScroll={(event) => setTop(event.currentTarget.scrollTop)}
        onKeyDown={onKey}
        onWheel={onWheel}
      >
        <canvas
          ref={canvas}
          aria-hidden="true"
          style={{ width, height }}
          onClick={(event) => {
            const row = rowUnder(event);
            if (row >= 0) onPick(table.call(row).key);
          }}
          onDoubleClick={(event) => zoomTo(rowUnder(event))}
          onMouseMove={(event) => setHovered(rowUnder(event))}
          onMouseLeave={() => setHovered(-1)}
        />
        <div style={{ height: Math.max(0, flame.lanes * LANE_PX + 2 - height) }} />
      </div>
      <p className="pad-bar flame-said" role="status">
        {said >= 0 ? described(table, flame, measure, said) : <span className="muted">Point at a call, or walk to one.</span>}
      </p>
      <Legend />
    </>
  );
}

function within(from: number, to: number): Zoom {
  const least = 1e-7;
  const length = Math.max(least, Math.min(1, to - from));
  if (length >= 1) return WHOLE;
  const start = Math.min(1 - length, Math.max(0, from));
  return { from: start, to: start + length };
}

interface Scene {
  table: CallTable;
  flame: Flame;
  zoom: Zoom;
  width: number;
  height: number;
  top: number;
  picked: number;
  /** The moment that is looked at, as a share of the whole; what began later is drawn faint. */
  moment: number | null;
  colours: Colours;
}

function draw(canvas: HTMLCanvasElement, scene: Scene): void {
  const { table, flame, zoom, width, height, top, picked, moment, colours } = scene;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d")!;
  context.scale(ratio, ratio);
  context.fillStyle = colours.bg3;
  context.fillRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const firstLane = Math.floor(top / LANE_PX);
  const view = { ...zoom, width, firstLane, lanes: Math.ceil(height / LANE_PX) + 1 };
  paint(table, flame, view, (row, x, wide, lane) => {
    const y = lane * LANE_PX - top;
    const left = Math.max(0, x);
    const right = Math.min(width, x + wide);
    const gap = right - left > 4 ? 1 : 0;
    const fill = fillOf(table, row);
    context.globalAlpha = moment !== null && flame.from[row]! > moment ? 0.25 : 1;
    context.fillStyle = colours[fill];
    context.fillRect(left, y + 1, Math.max(1, right - left - gap), LANE_PX - 2);
    if (row === picked) {
      context.strokeStyle = colours.fg;
      context.lineWidth = 2;
      context.strokeRect(left + 1, y + 2, Math.max(2, right - left - 3), LANE_PX - 4);
    }
    if (right - left < MIN_LABEL_PX) return;
    context.fillStyle = fill === "step" ? colours.fg : colours.onFill;
    context.save();
    context.beginPath();
    context.rect(left, y, right - left - 4, LANE_PX);
    context.clip();
    context.fillText(visible(table.nameBelow(row)), left + 6, y + LANE_PX / 2 + 0.5);
    context.restore();
  });
  context.globalAlpha = 1;
  if (moment === null || moment < zoom.from || moment > zoom.to) return;
  context.fillStyle = colours.fg;
  context.fillRect(Math.min(width - 2, ((moment - zoom.from) / (zoom.to - zoom.from)) * width), 0, 2, height);
}

type Fill = "llm" | "tool" | "step" | "bad" | "held";

function fillOf(table: CallTable, row: number): Fill {
  const stop = table.stops[table.stop[row]!];
  const status = table.statuses[table.status[row]!];
  if (stop?.cause && status === "halt") return "bad";
  if (status === "halt" || status === "fail" || status === "interrupted") return "held";
  const kind = table.kinds[table.kind[row]!];
  return kind === "llm" || kind === "tool" ? kind : "step";
}

function valueOf(flame: Flame, row: number): number {
  return (flame.to[row]! - flame.from[row]!) * flame.total;
}

function described(table: CallTable, flame: Flame, measure: Measure, row: number): string {
  const call = table.call(row);
  const tree = table.tree();
  const parts = [visible((call.nodeType && call.node) || call.name), call.nodeType ?? call.model ?? call.kind];
  parts.push(`${FORMATS[measure](valueOf(flame, row))} (${Math.round((100 * valueOf(flame, row)) / flame.total)} %)`);
  if (measure !== "money" && tree.costNanos[row]) parts.push(formatUsd(tree.costNanos[row]!));
  if (call.stop) parts.push(visible(call.stop.message));
  return parts.join(" · ");
}

/** The same figures as text: the calls that took most, without what is below them counted twice. */
function Heaviest({ table, flame, measure, picked, onPick }: Drawn) {
  const rows = Array.from(table.tree().order).sort((one, other) => valueOf(flame, other) - valueOf(flame, one));
  const shown = rows.slice(0, TABLE_ROWS);
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label={`Calls by ${MEASURES[measure].toLowerCase()}`}>
      <table className="tree">
        <thead>
          <tr>
            <th scope="col">Call</th>
            <th scope="col" className="number">
              {MEASURES[measure]}
            </th>
            <th scope="col" className="number">
              Share
            </th>
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => {
            const call = table.call(row);
            return (
              <tr key={row} aria-selected={call.key === picked}>
                <td>
                  <button className="plain" aria-expanded={call.key === picked} onClick={() => onPick(call.key)}>
                    <CallName call={call} name={(call.nodeType && call.node) || call.name} />
                  </button>
                </td>
                <td className="number">{FORMATS[measure](valueOf(flame, row))}</td>
                <td className="number">{((100 * valueOf(flame, row)) / flame.total).toFixed(1)} %</td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {rows.length > shown.length && (
        <p className="pad muted">
          The first {formatCount(shown.length)} of {formatCount(rows.length)} calls. Each is counted with all below it.
        </p>
      )}
    </div>
  );
}
