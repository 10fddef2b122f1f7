"""What a run produced, and the one JSON object that says it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hisparse.engine import EngineStats, RequestResult
    from hisparse.engine.verify import VerifyResult


@dataclass(frozen=True, slots=True)
class RunReport:
    """Results and totals of one `generate`. `verify` is None when it was not asked for, or interrupted."""

    results: "Sequence[RequestResult]"
    stats: "EngineStats"
    verify: "VerifyResult | None" = None

    @property
    def verified_different(self) -> bool:
        """Whether a verification ran and found a difference."""
        return self.verify is not None and not self.verify.identical


def report_json(report: RunReport) -> dict[str, Any]:
    """The report as JSON values. Times in seconds, sizes in bytes; what was not measured is null."""
    stats = report.stats
    return {
        "requests": [_request(result) for result in report.results],
        "kv": _pick(
            stats.kv,
            "total_bytes",
            "device_bytes",
            "indexer_bytes",
            "host_bytes",
            "host_physical_bytes",
            "pages_resident",
            "pages_host",
        ),
        "rows": _pick(stats.rows, "resident", "hot", "miss", "unreachable"),
        "moved": _pick(stats.moved, "host_to_device_bytes", "device_to_host_bytes"),
        "reused": _pick(stats.reused, "device", "host", "cpu_tier", "files", "computed"),
        "spills": stats.spills,
        "preemptions": stats.preemptions,
        "verify": None if report.verify is None else _verify(report.verify),
    }


def _request(result: "RequestResult") -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": len(result.output_ids),
        "text": result.text,
        "ttft_s": _finite(result.ttft_s),
        "tpot_s": _finite(result.tpot_s),
    }


def _verify(verify: "VerifyResult") -> dict[str, Any]:
    return {
        "reference": verify.reference,
        "identical": verify.identical,
        "max_logit_diff": _finite(verify.max_logit_diff),
    }


def _pick(part: Any, *names: str) -> dict[str, int]:
    values = asdict(part)
    return {name: values[name] for name in names}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None
