// Server-sent events from the bytes of a response, in pieces of any size.

export interface Frame {
  id: string;
  event: string;
  data: string;
}

/** Returns a function that takes the next piece of text and gives the frames it completes. */
export function frameParser(): (piece: string) => Frame[] {
  let rest = "";
  let frame: Frame = { id: "", event: "", data: "" };
  return (piece) => {
    const frames: Frame[] = [];
    const lines = (rest + piece).split(/\r\n|\n/);
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "") {
        if (frame.data) frames.push(frame);
        frame = { id: "", event: "", data: "" };
        continue;
      }
      const colon = line.indexOf(":");
      if (colon === 0) continue;
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") frame.data += (frame.data ? "\n" : "") + value;
      else if (field === "id" || field === "event") frame[field] = value;
    }
    return frames;
  };
}
