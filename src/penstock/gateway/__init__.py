"""A gateway between programs in any language and model providers: every model request is a contained call of a run."""
