"""Runs on Temporal: each run is a workflow, and each stretch of work on it one activity.

Temporal decides which worker has a run, notices that a worker has died, keeps timers and priorities, and delivers
signals. Everything else stays in PostgreSQL: no input, prompt, output or secret is in Temporal's history.
"""

from penstock.engines.temporal.engine import TemporalEngine
from penstock.engines.temporal.settings import TemporalSettings

__all__ = ["TemporalEngine", "TemporalSettings"]
