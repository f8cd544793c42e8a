"""Kafka as the event log, through confluent-kafka.

`evergreen.events.event_log` describes its guarantees.

`publisher` and `subscriber` are its two sides, opened at a `location`. The operator of the brokers
creates the topic and `<topic>.dead-letters`, unless the brokers create topics on first use.
"""
