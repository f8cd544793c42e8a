"""What follows a decision: restraint, one run at a time, corrective actions, notifications."""
