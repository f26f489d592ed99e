// What is shown in place of a page that failed, so that one page never takes the others with it.

import { Component, type ReactNode } from "react";
import { visible } from "./visible.ts";

interface State {
  error: unknown;
}

/** Browsers say in these words that a part of the page could not be loaded; each says it in its own. */
const NOT_LOADED = /dynamically imported module|importing a module script|module script failed|preload/i;

interface Props {
  /** The place that is shown: another one is tried again. */
  place: string;
  children: ReactNode;
}

export class Boundary extends Component<Props, State> {
  override state: State = { error: null };

  static getDerivedStateFromError(error: unknown): State {
    return { error };
  }

  override componentDidUpdate(before: Props): void {
    if (before.place !== this.props.place && this.state.error !== null) this.setState({ error: null });
  }

  override render(): ReactNode {
    const { error } = this.state;
    if (error === null) return this.props.children;
    const message = error instanceof Error ? error.message : String(error);
    return (
      <>
        <h1>This page cannot be shown</h1>
        <div className="note bad" role="alert">
          {NOT_LOADED.test(message)
            ? "A part of it could not be loaded: the server does not answer, or it has another version of this page now."
            : `It failed: ${visible(message)}`}
        </div>
        <div className="bar">
          <button className="primary" onClick={() => location.reload()}>
            Reload the page
          </button>
          <a href="#/runs">Runs</a>
        </div>
      </>
    );
  }
}
