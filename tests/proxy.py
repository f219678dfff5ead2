"""A proxy before the object server that misbehaves on request, as networks and services do."""

import http.client
import socketserver
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Misbehaviour:
    """What goes wrong with requests for which ``concerns`` is true; the first so many of each kind of trouble."""

    refuse: int = 0
    """Answered with 503."""
    reset: int = 0
    """The connection is cut in the middle of the body."""
    truncate: int = 0
    """Half of the body comes, and its length says so."""
    other_range: int = 0
    """A range is answered with as many bytes from elsewhere."""
    seconds: float = 0.0
    """Every answer comes so late, drop by drop."""
    before: object = None
    """Called with the number of the request before it is passed on."""
    concerns: object = field(default=lambda method, path, headers: True)
    num_requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, method, path, headers):
        """The trouble for this request."""
        with self.lock:
            self.num_requests += 1
            number = self.num_requests
            if self.before is not None:
                self.before(number)
            if not self.concerns(method, path, headers):
                return ""
            for kind in ("refuse", "reset", "truncate", "other_range"):
                left = getattr(self, kind)
                if left and (kind == "refuse" or "range" in headers):
                    setattr(self, kind, left - 1)
                    return kind
        return ""


class Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self):
        try:
            while self.one():
                pass
        except OSError:
            pass

    def one(self):
        words = self.rfile.readline().decode("latin-1").split()
        if len(words) != 3:
            return False
        method, target, _ = words
        headers = {}
        while (line := self.rfile.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        content = self.rfile.read(int(headers.get("content-length", 0)))
        trouble = self.server.trouble.next(method, target, headers)
        time.sleep(self.server.trouble.seconds)
        if trouble == "refuse":
            self.answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
            return True
        if trouble == "other_range":
            low, _, high = headers["range"].removeprefix("bytes=").partition("-")
            headers = {**headers, "range": f"bytes={int(low) + 1}-{int(high) + 1}" if int(low) else "bytes=1-1"}
        status, found, body = self.ask(method, target, headers, content)
        if trouble == "reset":
            self.answer(status, found, body[: len(body) // 2], len(body))
            return False
        if trouble == "truncate":
            body = body[: len(body) // 2]
        self.answer(status, found, body, len(body) if method != "HEAD" else None)
        return True

    def ask(self, method, target, headers, content):
        connection = http.client.HTTPConnection(self.server.behind, timeout=60)
        kept = {name: value for name, value in headers.items() if name not in ("connection", "transfer-encoding")}
        connection.request(method, target, content or None, kept)
        answer = connection.getresponse()
        found = answer.status, answer.getheaders(), answer.read()
        connection.close()
        return found

    def answer(self, status, headers, body, length=None):
        lines = [f"HTTP/1.1 {status} X"]
        left_out = {"connection", "transfer-encoding", "date", "server"} | (
            {"content-length"} if length is not None else set()
        )
        lines += [f"{name}: {value}" for name, value in headers if name.lower() not in left_out]
        if length is not None or status == 503:
            lines.append(f"Content-Length: {len(body) if length is None else length}")
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)


class Proxy(socketserver.ThreadingTCPServer):
    """Listens at ``address``; passes on to the server at ``behind``."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False

    def __init__(self, behind, trouble):
        self.behind, self.trouble = urlsplit(behind).netloc, trouble
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *failure):
        self.shutdown()
        self.server_close()
