"""The model registry on disk: models, releases, promotion journal, step notes and traffic plan."""
