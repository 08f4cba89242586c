"""The Grafana dashboard that the documentation ships."""

from __future__ import annotations

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"


def dashboard_metrics() -> set[str]:
    """The Prometheus names of the metrics that the dashboard's panels query."""
    dashboard = json.loads(DASHBOARD.read_text())
    names = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names.update(re.findall(r"one_step_off_\w+", target["expr"]))
    return names
