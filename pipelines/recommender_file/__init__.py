"""`recommender.yaml`: the file in which people describe a recommender, and the commands about it.

What a description is, is `config.spec`'s; accepted ones are kept by `store.recommenders`.
"""
