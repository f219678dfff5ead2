"""An S3-compatible server of one folder, read-only, as fast as Python can be: it leaves the copying to the kernel.

``GET`` (ranges, ``If-Match``), ``HEAD`` and ``ListObjectsV2``. Every request waits ``--latency`` seconds first, as with
a real service, and all connections together send at most ``--rate`` bytes a second. ``--keys N`` adds a bucket ``many``
with so many keys that are made up while they are listed. ``/stats`` tells requests by kind and bytes of bodies.
"""

from __future__ import annotations

import argparse
import json
import socketserver
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TIME = "2026-01-01T00:00:00.000Z"
DAY = "Thu, 01 Jan 2026 00:00:00 GMT"
COUNTS: Counter[str] = Counter()
LOCK = threading.Lock()
SLICE_BYTES = 1 << 20


class Handler(socketserver.StreamRequestHandler):
    """Requests of one connection."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        try:
            while self.one():
                pass
        except (ConnectionError, TimeoutError):
            pass

    def one(self) -> bool:
        line = self.rfile.readline().decode("latin-1").split()
        if len(line) != 3:
            return False
        method, target, _ = line
        headers = {}
        while (header := self.rfile.readline().strip()) != b"":
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        parts = urlsplit(target)
        path, query = unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)
        if path == "stats":
            with LOCK:
                self.answer(200, json.dumps(COUNTS).encode())
            return True
        time.sleep(self.server.options.latency)
        bucket, _, key = path.partition("/")
        if "list-type" in query:
            self.count("list")
            self.listing(bucket, {name: values[0] for name, values in query.items()})
        else:
            self.count(method.lower())
            self.object(method, key, headers)
        return True

    def count(self, kind: str, number: int = 1) -> None:
        with LOCK:
            COUNTS[kind] += number

    def answer(self, status: int, body: bytes = b"", more: str = "", length: int | None = None) -> None:
        size = len(body) if length is None else length
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {size}\r\nLast-Modified: {DAY}\r\n{more}\r\n"
        self.wfile.write(head.encode() + body)

    def object(self, method: str, key: str, headers: dict[str, str]) -> None:
        path = self.server.options.folder / key
        if not path.is_file():
            self.answer(404)
            return
        size, tag = path.stat().st_size, f'"{path.stat().st_mtime_ns:x}"'
        if headers.get("if-match", tag) != tag:
            self.answer(412)
            return
        more = f"ETag: {tag}\r\nAccept-Ranges: bytes\r\n"
        if method == "HEAD":
            self.answer(200, more=more, length=size)
            return
        first, last = 0, size - 1
        if "range" in headers:
            low, _, high = headers["range"].removeprefix("bytes=").partition("-")
            first, last = int(low), min(int(high or size - 1), size - 1)
            if first >= size:
                self.answer(416)
                return
            more += f"Content-Range: bytes {first}-{last}/{size}\r\n"
        self.count("bytes", last - first + 1)
        self.answer(206 if "range" in headers else 200, more=more, length=last - first + 1)
        with path.open("rb") as file:
            for at in range(first, last + 1, SLICE_BYTES):
                length = min(SLICE_BYTES, last + 1 - at)
                self.server.wait_for(length)
                self.connection.sendfile(file, at, length)

    def listing(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = int(query.get("max-keys", 1000))
        if bucket == "many":
            page, folders, more = made_up(self.server.options.keys, after, limit)
        else:
            page, folders, more = self.server.page(prefix, delimiter, after, limit)
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>{TIME}</LastModified><ETag>&quot;{tag}&quot;</ETag>"
            f"<Size>{size}</Size></Contents>"
            for key, size, tag in page
        ] + [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders]
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>"
        )
        self.answer(200, text.encode())


def made_up(num_keys: int, after: str, limit: int) -> tuple[list[tuple[str, int, str]], list[str], bool]:
    """A page of a bucket with ``num_keys`` keys, a thousand a step."""
    first = int(after[3:10]) * 1000 + int(after[-3:]) + 1 if after else 0
    last = min(first + limit, num_keys)
    page = [(f"run{n // 1000:07d}/step/{n % 1000:03d}", 1 << 20, "00") for n in range(first, last)]
    return page, [], last < num_keys


class Server(socketserver.ThreadingTCPServer):
    """Serves one folder."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.free_at = options, 0.0
        found = [path for path in options.folder.rglob("*") if path.is_file()] if options.folder else []
        self.keys = sorted(
            (str(path.relative_to(options.folder)), path.stat().st_size, f"{path.stat().st_mtime_ns:x}")
            for path in found
        )
        super().__init__(("127.0.0.1", options.port), Handler)

    def wait_for(self, num_bytes: int) -> None:
        """Until so many bytes more may be sent."""
        if self.options.rate:
            with LOCK:
                now = time.monotonic()
                self.free_at = max(self.free_at, now) + num_bytes / self.options.rate
                wait = self.free_at - now
            time.sleep(wait)

    def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[list, list[str], bool]:
        keys = [entry for entry in self.keys if entry[0].startswith(prefix) and entry[0] > after]
        if not delimiter:
            return keys[:limit], [], len(keys) > limit
        plain = [entry for entry in keys if delimiter not in entry[0][len(prefix) :]]
        inner = {entry[0][len(prefix) :].split(delimiter)[0] for entry in keys if delimiter in entry[0][len(prefix) :]}
        return plain, sorted(f"{prefix}{name}{delimiter}" for name in inner), False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before every answer")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second; 0: no limit")
    parser.add_argument("--keys", type=int, default=0)
    with Server(parser.parse_args()) as server:
        server.serve_forever()
