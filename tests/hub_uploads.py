"""tests/hub.py with uploads: repositories are made, files arrive by Git LFS or by Xet, and a commit is all or nothing.

The library's own client of Xet writes into a folder (cas) instead of a server of Xet.
"""

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hub import COMMIT, Handler, serving

TOKENS: dict[str, dict[str, Any]] = {
    "hf_write": {"name": "ann", "orgs": [{"name": "org"}], "auth": {"accessToken": {"role": "write"}}},
    "hf_read": {"name": "ann", "orgs": [{"name": "org"}], "auth": {"accessToken": {"role": "read"}}},
    "hf_fine": {"name": "ann", "orgs": [], "auth": {"accessToken": {"role": "fineGrained"}}},
    "hf_else": {"name": "bob", "orgs": [], "auth": {"accessToken": {"role": "write"}}},
}
"""Token -> the hub's answer to whoami."""
_WRITERS = ("hf_write", "hf_fine")
_LARGE = (".safetensors", ".png")


class Uploads(Handler):
    """A hub that takes uploads. private: names of private repositories."""

    private: set[str]
    store: dict[str, bytes]
    """Content of large files by SHA-256."""
    cas: Path
    refuses: set[str]
    """Words: a request whose path has one of them is refused."""
    reached: threading.Event
    """Is set when content of a large file comes, which then waits for `goes_on`."""
    goes_on: threading.Event

    def do_GET(self) -> None:
        self._upload() or super().do_GET()

    def do_POST(self) -> None:
        self._upload() or super().do_POST()

    def do_PUT(self) -> None:
        self._upload()

    def _upload(self) -> bool:
        """Answers a request that uploads need; returns whether it was one."""
        path, token = self.path.partition("?")[0], (self.headers["Authorization"] or "").removeprefix("Bearer ")
        name = found[1] if (found := re.search(r"(?:^/api/models|^)/((?!api/)[^/]+/[^/.]+)", path)) else ""
        if any(word in path for word in self.refuses):
            self._body()
            self._send(403, b"", {"X-Error-Message": "out of space"})
        elif path == "/api/whoami-v2":
            self._json(TOKENS.get(token, {}), 200 if token in TOKENS else 401)
        elif name in self.private and token not in _WRITERS:
            self._body()
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path == f"/api/models/{name}" and (root := self._root(name)).is_dir():
            about: dict[str, Any] = {"id": name, "sha": COMMIT, "private": name in self.private, "tags": []}
            self._json(about | {"siblings": [{"rfilename": file.name} for file in sorted(root.iterdir())]})
        elif path.endswith("/auth-check/write"):
            self._send(200 if token in _WRITERS else 403, b"", {})
        elif "/xet-write-token/" in path:
            self._json({"casUrl": f"local://{self.cas}", "exp": 4_000_000_000, "accessToken": "x"})
        elif path.startswith("/lfs/"):
            self.reached.set()
            self.goes_on.wait(60)
            content = self._body()
            assert hashlib.sha256(content).hexdigest() == path.removeprefix("/lfs/")
            self.store[path.removeprefix("/lfs/")] = content
            self._send(200, b"", {})
        elif path == "/api/validate-yaml":
            self._asked()
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(self._asked())
        elif path.endswith("/preupload/main"):
            files = [self._mode(name, file["path"]) for file in self._asked()["files"]]
            self._json({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            self._json({"transfer": "basic", "objects": [self._instruction(each) for each in self._asked()["objects"]]})
        elif path.endswith("/commit/main"):
            self._commit(self._root(name), [json.loads(line) for line in self._body().splitlines()])
        else:
            return False
        return True

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _asked(self) -> Any:
        return json.loads(self._body())

    def _json(self, answer: Any, status: int = 200) -> None:
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _root(self, name: str) -> Path:
        return self.folder / "models" / name

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if self._root(name).is_dir():
            self._json({"url": name}, 409)
            return
        self._root(name).mkdir(parents=True)
        if asked.get("visibility") == "private":
            self.private.add(name)
        self._json({"url": f"http://{self.headers['Host']}/{name}"})

    def _mode(self, name: str, path: str) -> dict[str, Any]:
        there, large = self._root(name) / path, path.endswith(_LARGE)
        content = there.read_bytes() if there.is_file() else None
        oid = None
        if content is not None:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
            oid = hashlib.sha256(content).hexdigest() if large else blob.hexdigest()
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _instruction(self, asked: dict[str, Any]) -> dict[str, Any]:
        there = asked["oid"] in self.store
        address = f"http://{self.headers['Host']}/lfs/{asked['oid']}"
        return {**asked, **({} if there else {"actions": {"upload": {"href": address}}})}

    def _commit(self, root: Path, lines: list[dict[str, Any]]) -> None:
        """Write a copy of the repository, and put it in its place."""
        fresh = root.with_name(f".{root.name}")
        shutil.copytree(root, fresh)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                (fresh / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":  # what came by Xet is in its own store
                (fresh / value["path"]).write_bytes(self.store.get(value["oid"], value["oid"].encode()))
            elif line["key"] == "deletedFile":
                (fresh / value["path"]).unlink()
        shutil.rmtree(root)
        fresh.rename(root)
        self._json(
            {
                "commitUrl": f"http://{self.headers['Host']}/{root.parent.name}/{root.name}/commit/{COMMIT}",
                "commitOid": COMMIT,
            }
        )


@contextmanager
def taking_uploads(folder: Path) -> Iterator[tuple[str, type[Uploads]]]:
    """(address, state) of a hub that keeps its repositories in a folder."""

    own = {"private": set(), "store": {}, "refuses": set(), "reached": threading.Event(), "goes_on": threading.Event()}
    state: type[Uploads] = type("State", (Uploads,), own | {"cas": folder / "cas"})
    state.goes_on.set()
    with serving(folder, state) as address:
        yield address, state
