// Components whose code is loaded when they are first shown.

import { useEffect, useState, type ComponentType, type ReactNode } from "react";

/**
 * A component that shows `waiting` until its code is there, and itself at once then. React's `lazy` would hold it back
 * until 300 ms after the last time that anything was shown in place of content.
 */
export function later<P extends object>(
  load: () => Promise<{ default: ComponentType<P> }>,
  waiting: ReactNode,
): ComponentType<P> {
  let Loaded: ComponentType<P> | null = null;
  return function Later(props: P) {
    const [, setLoaded] = useState(Loaded !== null);
    const [error, setError] = useState<unknown>(null);
    useEffect(() => {
      if (Loaded) return;
      let isShown = true;
      load().then(
        (module) => {
          Loaded = module.default;
          if (isShown) setLoaded(true);
        },
        (failed: unknown) => isShown && setError(failed),
      );
      return () => {
        isShown = false;
      };
    }, []);
    if (error !== null) throw error;
    return Loaded ? <Loaded {...props} /> : waiting;
  };
}
