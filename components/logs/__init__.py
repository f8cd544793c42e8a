"""The logs that carry records from client to monitor, a module a backend. What all promise: `contracts.event_log`."""
