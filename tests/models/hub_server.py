"""A small Hugging Face hub on loopback, as its client library sees one."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
OLDER = "0ddba11" + "0" * 33
LARGE_BYTES = 1000
"""A file of at least this size is one of LFS: named by its SHA-256, and sent after a redirect."""


@dataclass
class Repository:
    """A model or a data set on the hub. What is wrong with it is said here, too."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    token: str = ""
    """A private repository shows itself to this token only."""
    gated: bool = False
    lost: set[str] = field(default_factory=set)
    """Files that are listed, but are not there."""
    false: set[str] = field(default_factory=set)
    """Files that arrive with another content than their SHA-256 says."""
    cut_once: set[str] = field(default_factory=set)
    """Files whose first transfer ends in the middle."""
    stated_bytes: dict[str, int] = field(default_factory=dict)
    """Sizes that the hub states instead of the true ones."""


@dataclass
class Hub:
    """What the server knows and has been asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path, and the range asked for."""
    endpoint: str = ""
    store: str = ""
    """Where large files lie: another host, as it looks."""

    def fetched(self, part: str) -> list[str]:
        """The ranges of the transfers whose path has this in it."""
        return [range_ for method, path, range_ in self.asked if method == "GET" and part in path]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub inside the block."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    hub.store = f"http://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Make a repository, say how files are sent, take a commit."""
        path = unquote(urlsplit(self.path).path).strip("/")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") is None:
            return self._refuse(401, "Unauthorized")
        lines = [json.loads(line) for line in body.splitlines()]
        if path == "api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "api/repos/create":
            name = f"{lines[0]['organization']}/{lines[0]['name']}"
            self.served.repositories.setdefault(name, Repository({}))
            return self._json({"url": f"{self.served.endpoint}/{name}"})
        name, _, kind = path.removeprefix("api/models/").partition("/main")[0].rpartition("/")
        if kind == "preupload":
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in lines[0]["files"]
            ]
            return self._json({"files": files})
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.served.repositories[name].files[line["value"]["path"]] = content
        at = f"{self.served.endpoint}/{name}/commit/{COMMIT}"
        return self._json({"commitUrl": at, "commitOid": COMMIT})

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.served.asked.append((self.command, path, self.headers.get("Range", "")))
        path = path.replace("api/datasets/", "api/models/").removeprefix("datasets/")
        for name, repository in self.served.repositories.items():
            if path.startswith(("api/models/" + name + "/", name + "/")) or path.endswith(name):
                return self._of(repository, name, path)
            if path.startswith("cdn/" + name + "/"):
                return self._content(repository, path.removeprefix(f"cdn/{name}/"))
        return self._refuse(401, "RepoNotFound")

    def _of(self, repository: Repository, name: str, path: str) -> None:
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._refuse(401, "RepoNotFound")
        rest = path.removeprefix("api/models/").removeprefix(name).strip("/").split("/")
        kind, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.revisions.values():
            return self._refuse(404, "RevisionNotFound")
        if kind == "resolve":
            return self._resolve(repository, name, commit, "/".join(rest[2:]))
        if kind == "tree":
            return self._json([self._entry(repository, each) for each in repository.files])
        siblings = [
            {"rfilename": file, "size": self._stated(repository, file)} for file in repository.files
        ]
        return self._json({"id": name, "sha": commit, "siblings": siblings, "private": False})

    def _resolve(self, repository: Repository, name: str, commit: str, file: str) -> None:
        if repository.gated:
            return self._refuse(403, "GatedRepo")
        if file not in repository.files or file in repository.lost:
            return self._refuse(404, "EntryNotFound")
        content = repository.files[file]
        head = {"X-Repo-Commit": commit, "ETag": f'"{_git(content)}"'}
        if len(content) < LARGE_BYTES:
            return self._send(content, head)
        head |= {"X-Linked-ETag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        return self._send(
            b"", {**head, "Location": f"{self.served.store}/cdn/{name}/{file}"}, status=302
        )

    def _content(self, repository: Repository, file: str) -> None:
        content = repository.files[file]
        if file in repository.false:
            content = content[:-1] + bytes([content[-1] ^ 1])
        begin = int((self.headers.get("Range") or "bytes=0-").split("=")[1].split("-")[0])
        part = content[begin:]
        head = {"ETag": f'"{_sha256(repository.files[file])}"', "Accept-Ranges": "bytes"}
        if begin:
            head["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if file in repository.cut_once and self.command == "GET":
            repository.cut_once.discard(file)
            self._send(part, head, status=206 if begin else 200, sent=len(part) // 2)
            self.close_connection = True
            return
        self._send(part, head, status=206 if begin else 200)

    def _stated(self, repository: Repository, file: str) -> int:
        return repository.stated_bytes.get(file, len(repository.files[file]))

    def _entry(self, repository: Repository, file: str) -> dict[str, Any]:
        content = repository.files[file]
        entry: dict[str, Any] = {
            "type": "file", "path": file, "size": len(content), "oid": _git(content),
        }  # fmt: skip
        if len(content) >= LARGE_BYTES:
            entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 134}
        return entry

    def _json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status=status)

    def _send(
        self, body: bytes, head: dict[str, str], *, status: int = 200, sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in head.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
