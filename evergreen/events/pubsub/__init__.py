"""Google Pub/Sub as the event log, through google-cloud-pubsub.

`location` parses the URL and opens the writing and the reading side. `resources` implements the
writing side, and `subscriber` implements the reading side. `evergreen.events.event_log` describes
the guarantees. Pub/Sub retains a message for at most 31 days, and does not deliver messages in
order.
"""
