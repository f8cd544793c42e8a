"""What any program of ours needs to run: errors and exit codes, durable files, forked work. Knows no other room."""
