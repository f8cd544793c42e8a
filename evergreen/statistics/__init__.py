"""Column profiles and their comparison: tests, effect sizes and intervals for dependent rows."""
