"""The model store: models, the promotion journal, run notes and reports, the traffic plan."""
