"""Kafka as the event log, through confluent-kafka.

`evergreen.events.event_log` describes what the log guarantees.

The module `publisher` writes a log at a `location`, and the module `subscriber` reads it. The
operator of the brokers creates the topic and `<topic>.dead-letters`, unless the brokers create
topics on first use.
"""
