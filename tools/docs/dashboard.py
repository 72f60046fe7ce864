"""Write docs/grafana/metal-engine.json: a Grafana dashboard over /metrics.

python -m tools.docs.dashboard
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "metal-engine.json"
SELECT = '{model_name=~"$model"}'

# Title, unit, and legend -> expression. `N` stands for the prefix, `S` for the selector, `R` for the range.
Panel = tuple[str, str, dict[str, str]]


def rate(name: str) -> str:
    return f"sum(rate(N{name}S[R]))"


def quantiles(name: str) -> dict[str, str]:
    return {
        f"P{round(100 * q)}": f"histogram_quantile({q}, sum by (le) (rate(N{name}_bucketS[R])))"
        for q in (0.5, 0.9, 0.99)
    }


PANELS: list[Panel] = [
    ("Tokens per second", "short",
     {"prompt": rate("prompt_tokens_total"), "generation": rate("generation_tokens_total")}),
    ("Requests", "short", {"running": "sum(Nnum_requests_runningS)", "waiting": "sum(Nnum_requests_waitingS)"}),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
    ("End to end", "s", quantiles("e2e_request_latency_seconds")),
    ("Time in the queue", "s", quantiles("request_queue_time_seconds")),
    ("Prefill", "s", quantiles("request_prefill_time_seconds")),
    ("Decode", "s", quantiles("request_decode_time_seconds")),
    ("KV cache in use", "percentunit", {"used": "max(Nkv_cache_usage_percS)"}),
    ("Prefix cache hit rate", "percentunit",
     {"hits": "sum(rate(Nprefix_cache_hits_totalS[R])) / sum(rate(Nprefix_cache_queries_totalS[R]))"}),
    ("Rows of packed steps, per second", "short", {"{{kind}}": "sum by (kind) (rate(Nstep_rows_totalS[R]))"}),
    ("Rows in a step", "short", quantiles("iteration_tokens_total")),
    ("Time of a step", "s", quantiles("step_time_seconds")),
    ("Requests that ended, per second", "reqps",
     {"{{finished_reason}}": "sum by (finished_reason) (rate(Nrequest_success_totalS[R]))"}),
    ("Requests turned away, per second", "reqps",
     {"{{reason}}": "sum by (reason) (rate(Nrequests_rejected_totalS[R]))"}),
    ("Preemptions and failed steps, per second", "short",
     {"preemptions": rate("num_preemptions_total"), "failed steps": rate("failed_steps_total")}),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    return {
        "title": "metal-engine",
        "uid": "metal-engine",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_DATASOURCE, _MODEL]},
        "panels": [_panel(i, *panel) for i, panel in enumerate(PANELS)],
    }


_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}
_MODEL = {
    "name": "model",
    "type": "query",
    "datasource": {"type": "prometheus", "uid": "$datasource"},
    "query": "label_values(metal_engine:num_requests_running, model_name)",
    "includeAll": True,
    "multi": True,
    "current": {"text": "All", "value": "$__all"},
    "refresh": 2,
}


def _panel(i: int, title: str, unit: str, expressions: dict[str, str]) -> dict[str, Any]:
    return {
        "id": i + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": 12 * (i % 2), "y": 8 * (i // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + j), "legendFormat": legend, "expr": _filled(expression)}
            for j, (legend, expression) in enumerate(expressions.items())
        ],
    }


def _filled(expression: str) -> str:
    expression = expression.replace("N", "metal_engine:").replace("[R]", "[$__rate_interval]")
    return expression.replace("S[", SELECT + "[").replace("S)", SELECT + ")")


def main() -> None:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
