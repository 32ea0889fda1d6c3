"""docs/alarms.md and the alerts for Prometheus have the alarms that the program raises."""

from __future__ import annotations

import re

from swarm.look.alarms.catalogue import CATALOGUE
from tests.docs.pages import ROOT, table, text


def test_the_table_is_the_catalogue() -> None:
    rows = {row[0].strip("`"): row[1:] for row in table(text("docs/alarms.md"))}
    assert rows == {
        name: [kind.severity, kind.when, kind.do, f"`{kind.alert}`" if kind.alert else ""]
        for name, kind in CATALOGUE.items()
    }


def test_the_alerts_exist() -> None:
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8")
    known = set(re.findall(r"alert: (\w+)", alerts))
    assert {kind.alert for kind in CATALOGUE.values() if kind.alert} <= known
