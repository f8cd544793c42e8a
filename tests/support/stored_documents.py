"""Small documents of the monitor, which are stored in memory and read back as after a restart."""

import json


class StoredDocuments:
    """Documents as JSON, and the counters stored with them."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.counts: dict[str, float] = {}

    def read_document(self, name):
        return json.loads(self.texts[name]) if name in self.texts else None

    def write_documents(self, documents, counts=None):
        self.texts |= {name: json.dumps(document) for name, document in documents.items()}
        for name, number in (counts or {}).items():
            self.counts[name] = self.counts.get(name, 0) + number
