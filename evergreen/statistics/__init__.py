"""Column profiles, and the comparison of two of them: tests, effect sizes, intervals, rows that are not independent."""
