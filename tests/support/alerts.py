"""The alerting rules, read from the shipped manifest."""

import yaml

from tests.support.rendering import K8S

MANIFEST = K8S / "components" / "observability" / "alerts.yaml"
SPEC = yaml.safe_load(MANIFEST.read_text())["spec"]
RULES = [rule for group in SPEC["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
