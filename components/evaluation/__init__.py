"""The evaluation step: is the candidate good enough to be served, and no worse than what is?

Reads held-out rows, the candidate and the live release; writes a Verdict and what people need to check it. Whether
the rows are fit to judge by is validation's; releasing the candidate is deployment's.
"""
