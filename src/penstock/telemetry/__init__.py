"""Export runs as OpenTelemetry spans.

OpenTelemetry is imported only when it is used: it comes with the extra `otel`.
"""

from __future__ import annotations

from penstock.telemetry.collector import otlp_provider
from penstock.telemetry.export import OtelExport, export_to_otel

__all__ = ["OtelExport", "export_to_otel", "otlp_provider"]
