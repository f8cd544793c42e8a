"""The exit handler: records how a run ended, from the notes that its steps left."""
