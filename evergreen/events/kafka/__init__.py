"""Kafka as the event log, through confluent-kafka.

`evergreen.events.event_log` describes its guarantees.

The modules `publisher` and `subscriber` write and read the log at a `location`. The operator of the
brokers creates the topic and `<topic>.dead-letters`, unless the brokers create topics on first use.
"""
