"""The exit handler: records how a run ended, from the notes of its steps."""
