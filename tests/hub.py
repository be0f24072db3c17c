"""A small Hugging Face hub on this machine: what huggingface_hub and datasets ask for, served from a folder.

<folder>/datasets/org/name/... and <folder>/models/org/name/..., each with one commit.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
GATED = "org/gated"
"""A repository that the server opens to nobody."""


class Handler(BaseHTTPRequestHandler):
    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer(json.loads(body)["paths"])

    def _answer(self, paths: list[str] | None = None) -> None:
        path = self.path.partition("?")[0]
        api = re.fullmatch(
            r"/api/(datasets|models)/(org/[^/]+)(?:/(revision|tree|paths-info|auth-check)(?:/([^/]+)(/.*)?)?)?", path
        )
        file = re.fullmatch(r"/(datasets/)?(org/[^/]+)/resolve/([^/]+)/(.+)", path)
        kind, name = (
            (api[1], api[2]) if api else ("datasets" if file and file[1] else "models", file[2] if file else "")
        )
        root = self.folder / kind / name
        revision = api[4] if api else file and file[3]
        if not name or not root.is_dir():
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in (None, "main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif name == GATED and (file or (api and api[3] == "auth-check")):
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif file:
            self._file(root / file[4])
        elif api and api[3] in ("tree", "paths-info"):
            known = [self._entry(root, path) for path in sorted(root.rglob("*"))]
            inside = (api[5] or "").strip("/")
            wanted = [
                entry
                for entry in known
                if (entry["path"] in paths if paths is not None else str(entry["path"]).startswith(inside))
            ]
            self._send(200, json.dumps(wanted).encode(), {})
        else:
            names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
            about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names], "tags": []}
            self._send(200, json.dumps(about).encode(), {})

    def _entry(self, root: Path, path: Path) -> dict[str, object]:
        kind = "directory" if path.is_dir() else "file"
        size = path.stat().st_size if path.is_file() else 0
        return {"type": kind, "path": str(path.relative_to(root)), "size": size, "oid": COMMIT}

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            self._send(206, content[start : end + 1], headers)
        else:
            self._send(200, content, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the console."""


@contextmanager
def serving(folder: Path, handler: type[Handler] = Handler) -> Iterator[str]:
    """The address of a hub that serves this folder: for HF_ENDPOINT."""
    handler = type("Handler", (handler,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
