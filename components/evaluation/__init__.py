"""The evaluation step: compare the candidate with the champion on held-out rows.

The step reads the held-out rows, the candidate and the live release. The step writes a Verdict, and
the reports that people need to check the verdict. Validation checks the rows, and deployment
releases the candidate.
"""
