"""What an engine does, in numbers that Prometheus reads."""

from hisparse.metrics.engine_metrics import EngineMetrics
from hisparse.metrics.server import MetricsServer

__all__ = ["EngineMetrics", "MetricsServer"]
