"""The schema of the training rows: how it is inferred, kept in versions, compared, curated, proposed and checked."""
