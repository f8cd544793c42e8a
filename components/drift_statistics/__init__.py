"""Whether two counted samples differ: distances, tests, and what rows of one request that are alike do to both."""
