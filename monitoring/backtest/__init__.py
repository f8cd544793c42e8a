"""The live judge over recorded records: would a policy have fired, does an incident replay to the same decisions."""
