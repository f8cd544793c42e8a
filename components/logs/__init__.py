"""The logs that carry records from client to monitor, a module a backend. What all promise: `logs.event_log`."""
