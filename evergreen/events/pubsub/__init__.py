"""Google Pub/Sub as the event log, through google-cloud-pubsub.

`location` reads the URL and opens both sides, which `resources` and `subscriber` implement.
`evergreen.events.event_log` describes the guarantees. Pub/Sub retains a message for at most 31 days
and delivers without an order.
"""
