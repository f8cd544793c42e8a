"""What follows a decision: one run of the pipeline at a time, and notifications of people."""
