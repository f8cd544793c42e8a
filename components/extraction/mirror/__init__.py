"""A lake in a bucket, read as a folder: what a window needs is fetched to a cache below `work`, and shown by its names.

`choice` says which objects, `cache` keeps them by generation, `view` gives one run a folder with the lake's own names,
`mirror` puts these together. Reading the rows is left to `Lake` and `CriteoFiles`, which see a folder like any other;
how bytes come out of a bucket, whole and several at a time, is `components.storage`'s.
"""
