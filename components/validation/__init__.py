"""The validation step: TFDV statistics, drift against the champion, and a decision.

The decision is pass, warn or block.
"""
