"""One script per number that the README states; each prints a ratio against a named peer, measured in the same run.

Nothing here is a test: no figure decides whether a build is right. `components` and the others know nothing of it.
"""
