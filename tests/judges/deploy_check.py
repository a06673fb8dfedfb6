"""Runs in the environment ``deploy``: the manifests against the schemas of Kubernetes, the queries as real PromQL.

``python deploy_check.py DEPLOY`` fails with what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kubernetes_validate
import promql_parser
import yaml

VERSIONS = ("1.30", "1.34")  # of Kubernetes
FOREIGN = ("ServiceMonitor", "Kustomization", "ScaledObject")  # their schemas are not in Kubernetes


def main() -> None:
    deploy = Path(sys.argv[1])
    for path in sorted((deploy / "kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for version in VERSIONS:
                if document["kind"] not in FOREIGN:
                    kubernetes_validate.validate(document, version, strict=True)
    dashboard = json.loads((deploy / "grafana/qserve.json").read_text(encoding="utf-8"))
    alerts = yaml.safe_load((deploy / "prometheus/alerts.yaml").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    scaled = yaml.safe_load((deploy / "kubernetes/keda/scaledobject.yaml").read_text(encoding="utf-8"))
    queries += [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    for query in queries:
        # Grafana puts these two in before it asks.
        promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$model", ".*"))
    print(f"{len(queries)} queries and the manifests of {', '.join(VERSIONS)} are fine")


if __name__ == "__main__":
    main()
