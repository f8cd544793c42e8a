"""Numbers of matured and of still open rows, per model version. Pure: no file, no clock, no network."""
