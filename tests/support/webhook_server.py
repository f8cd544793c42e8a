"""A webhook for tests over real HTTP that accepts messages, fails, hangs or asks for a delay."""

import json
import threading

from tests.support.http_double import HttpDouble, Reply

SECRET = "/services/T000/B000/a-secret-of-the-test"


class WebhookServer(HttpDouble):
    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.answers: list[
            tuple[int, dict]
        ] = []  # (status, headers) of the next responses, followed by status 200
        self.num_requests = 0
        self.hang = threading.Event()
        self.release = threading.Event()
        super().__init__()
        self.url += SECRET

    def answer(self, method, path, body, headers) -> Reply | None:
        self.num_requests += 1
        if self.hang.is_set():
            self.release.wait(30)
            return None
        status, more = self.answers.pop(0) if self.answers else (200, {})
        status = status if path == SECRET else 404
        if status == 200:
            self.messages.append(json.loads(body))
        return Reply(b"ok", status, more)

    def close(self) -> None:
        self.release.set()
        super().close()
