"""The controller: changes what is served between runs.

It runs canaries, baking, healing, rollback and promotion.
"""
