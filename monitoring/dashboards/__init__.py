"""Grafana dashboards: `*.yaml` says what each shows, the code makes the JSON that the cluster is sent."""
