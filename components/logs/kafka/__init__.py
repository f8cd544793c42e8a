"""Kafka as the record log, through confluent-kafka; what it promises is `logs.event_log`'s.

`publisher` and `subscriber` are the ends, opened at a `location`. Topics are made by whoever runs the brokers,
`<topic>.dead-letters` too; where brokers make topics by themselves, the first use does.
"""
