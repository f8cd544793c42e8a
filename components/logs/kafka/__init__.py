"""Kafka as the record log, through confluent-kafka; what it promises is `logs.event_log`'s.

`location` opens the ends of the log that a URL names, `publisher` and `subscriber` are the ends. Topics are made by
whoever runs the brokers, `<topic>.dead-letters` too; where brokers make topics by themselves, the first use does.
"""
