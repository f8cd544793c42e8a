"""What programs share on disk: models, promotion journal, run notes and reports, traffic plan; the archive of rows."""
