"""A webhook for tests: real HTTP that takes messages, fails, hangs, or asks for patience."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "/services/T000/B000/a-secret-of-the-test"


class WebhookServer:
    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.answers: list[tuple[int, dict]] = []  # (status, headers) of the next answers, before 200s
        self.asked = 0
        self.hang = threading.Event()
        self.release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked += 1
                if server.hang.is_set():
                    server.release.wait(30)
                    return
                status, headers = server.answers.pop(0) if server.answers else (200, {})
                if self.path != SECRET:
                    status = 404
                if status == 200:
                    server.messages.append(body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{SECRET}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
