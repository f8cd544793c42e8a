"""Grafana dashboards as code: what each shows (serving, model, pipeline), and the JSON that the cluster is sent."""
