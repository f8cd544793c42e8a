"""What was asked for and what restrains the next request, as all replicas must see it.

One object beside the lease holds the documents of the acting parts. Each write is conditional on what this holder saw
last, and it is made before the step that it tells of: a holder whose term is over is refused there, before it asks for
anything. The state folder keeps a copy; after a restart or a takeover the newer of both counts. Without a lease (one
replica) the state folder's copy is all there is.
"""

from __future__ import annotations

import json
from typing import Any

from components.runtime.errors import PermanentError
from components.storage.objects import ABSENT, Changed, Objects
from monitoring.acting.leadership import NotLeading
from monitoring.memory.store import Store

LEDGER_FILE = "acting.json"
Documents = dict[str, dict[str, Any]]
_NUMBER = "ledger"
"""Local document with the number of the ledger's last write."""


class Ledger:
    """The acting parts' documents, by name."""

    def __init__(self, store: Store, objects: Objects | None = None, *, term: int = 0) -> None:
        """Reads what the last holder left, and claims it for `term`.

        Args:
            store: This replica's memory.
            objects: Where the lease is kept; None = no other replica.
            term: Of the lease that this replica holds.

        Raises:
            NotLeading: a holder with a higher term has written.
            TemporaryError: the storage does not answer.
            PermanentError: the object is no ledger.
        """
        self._store, self._objects, self.term = store, objects, term
        self._generation, self._shared = ABSENT, Documents()
        self._number = int((store.read_document(_NUMBER) or {"number": 0})["number"])
        if objects is not None:
            self._take_over(objects)

    def read_document(self, name: str) -> dict[str, Any] | None:
        """The document kept under `name`; None where there is none."""
        return self._shared.get(name) or self._store.read_document(name)

    def write_documents(self, documents: Documents, counts: dict[str, float] | None = None) -> None:
        """Keeps these documents, and adds to this replica's counters.

        Raises:
            NotLeading: another replica has written since: this one is stale, and nothing was kept.
            TemporaryError: the storage does not answer; nothing was kept, or nobody knows.
        """
        self._number += 1
        if self._objects is not None:
            # Kept here only after it is kept there: a step that failed must not go out with the next one.
            shared = {**self._shared, **documents}
            self._write(self._objects, shared)
            self._shared = shared
        self._store.write_documents({**documents, _NUMBER: {"number": self._number}}, counts)

    def _take_over(self, objects: Objects) -> None:
        found = objects.read(LEDGER_FILE)
        if found is not None:
            document = _parse(found.content, objects.uri)
            if document["term"] > self.term:
                raise NotLeading(f"{objects.uri}/{LEDGER_FILE} is of term {document['term']}, this is {self.term}")
            self._generation = found.generation
            if document["number"] >= self._number:
                self._number, self._shared = document["number"], document["documents"]
        self._write(objects, self._shared)

    def _write(self, objects: Objects, documents: Documents) -> None:
        document = {"term": self.term, "number": self._number, "documents": documents}
        content = (json.dumps(document) + "\n").encode()
        try:
            self._generation = objects.write(LEDGER_FILE, content, if_generation=self._generation)
        except Changed as error:
            if not self._is_our_own(objects, content):
                raise NotLeading(f"another replica has written {objects.uri}/{LEDGER_FILE}") from error

    def _is_our_own(self, objects: Objects, content: bytes) -> bool:
        """Whether what is there is this very write or our last one, whose answer was lost on the way."""
        found = objects.read(LEDGER_FILE)
        if found is None or _parse(found.content, objects.uri)["term"] != self.term:
            return False
        self._generation = found.generation
        if found.content != content:
            self._generation = objects.write(LEDGER_FILE, content, if_generation=found.generation)
        return True


def last_term(objects: Objects) -> int:
    """Term of the holder that wrote last; 0 where nobody did.

    Raises:
        TemporaryError: the storage does not answer.
        PermanentError: the object is no ledger.
    """
    found = objects.read(LEDGER_FILE)
    return 0 if found is None else int(_parse(found.content, objects.uri)["term"])


def _parse(content: bytes, uri: str) -> dict[str, Any]:
    try:
        document = json.loads(content)
        return {
            "term": int(document["term"]),
            "number": int(document["number"]),
            "documents": dict(document["documents"]),
        }
    except (ValueError, TypeError, KeyError) as error:
        raise PermanentError(f"{uri}/{LEDGER_FILE} is no ledger ({error!r}); remove it if no run is active") from error
