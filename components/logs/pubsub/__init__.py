"""Google Pub/Sub as the record log, through google-cloud-pubsub; what it promises is `logs.event_log`'s.

`location` reads the URL and opens the ends, `publisher` and `subscriber` are the ends. Pub/Sub keeps a message for 31
days at most, and gives messages in no order.
"""
