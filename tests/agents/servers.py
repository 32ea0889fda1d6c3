"""Small real servers, honest or hostile, in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.agents.servers import FOLDER_VARIABLE
from peers.environments import Environment, load

GAME = '''
import json, os, random, socket, sys, threading, time
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Request, TextMessage

MODE = os.environ.get("MODE", "")
NOBODY = object()


class Session:
    """Asks for a number; the second attempt earns half."""

    def __init__(self, connection):
        self.connection, self.ws = connection, WSConnection(ConnectionType.SERVER)
        self.seed, self.steps = 0, 0

    def say(self, kind, data):
        self.connection.sendall(self.ws.send(TextMessage(json.dumps({"type": kind, "data": data}))))

    def observe(self, text, reward=None, done=False):
        observation = {"text": text, "steps": self.steps, "number": str(self.seed)}
        self.say("observation", {"observation": observation, "reward": reward, "done": done})

    def answer(self, message):
        data = message.get("data")
        if message["type"] == "reset":
            self.seed, self.steps = data["seed"] + data.get("add", 0), 0
            self.observe(f"write {self.seed}>", done=MODE == "over")
        elif message["type"] == "state":
            other = MODE == "other" and self.steps
            self.say("state", {"episode_id": str(self.seed + other), "step_count": self.steps})
            if MODE == "idle once" and not os.path.exists("closed"):
                open("closed", "w").close()
                self.connection.shutdown(socket.SHUT_RDWR)
        elif message["type"] == "step":
            self.steps += 1
            if "message" not in data:
                wrong = [{"loc": ["message"], "msg": "Field required"}]
                self.say("error", {"code": "VALIDATION_ERROR", "message": "no", "errors": wrong})
            elif not self.misbehave():
                right = data["message"] == str(self.seed)
                self.observe("wrong>", right / self.steps, right)

    def misbehave(self):
        if MODE == "hang":
            time.sleep(600)
        elif MODE == "close":
            self.connection.close()
        elif MODE == "die":
            os._exit(3)
        elif MODE == "die once" and self.steps == 2 and not os.path.exists("died"):
            open("died", "w").close()
            os._exit(3)
        elif MODE == "large":
            self.observe("x" * 10_000_000)
        elif MODE == "utf8":
            self.connection.sendall(b"\\x81\\x02\\xff\\xfe")
        elif MODE == "control":
            self.observe("\\x1b[31m\\x00red>")
        elif MODE == "twice":
            data = {"observation": {}, "reward": None, "done": False}
            turn = TextMessage(json.dumps({"type": "observation", "data": data}))
            self.connection.sendall(self.ws.send(turn) + self.ws.send(turn))  # never apart
        elif MODE == "schema":
            self.say("error", {"code": "VALIDATION_ERROR", "message": "no field message"})
        elif MODE == "raise":
            self.say("error", {"code": "EXECUTION_ERROR", "message": "division by zero"})
        elif MODE == "junk":
            self.connection.sendall(self.ws.send(TextMessage("{")))
        elif MODE == "deep":
            self.connection.sendall(self.ws.send(TextMessage("[" * 50000)))
        elif MODE == "list":
            self.say("observation", {"observation": ["text"], "reward": 1, "done": False})
        elif MODE == "reward":
            self.observe("x", "much")
        elif MODE == "yes":
            self.observe("x", True, True)
        elif MODE == "vast":
            self.observe("x", 10**400, True)
        elif MODE == "beyond":
            self.observe("x", 2.5, True)
        elif MODE == "silent":
            self.observe("x", None, True)
        elif MODE == "dice":
            self.observe(f"{random.random()}>", 0.5)
        else:
            return False
        return True

    def run(self):
        while data := self.connection.recv(65536):
            self.ws.receive_data(data)
            for event in self.ws.events():
                if isinstance(event, Request):
                    assert event.target == "/ws", event.target
                    if MODE == "head":
                        head = b"HTTP/1.1 101 Yes\\r\\nupgrade: websocket\\r\\nconnection: \\xff"
                        return self.connection.sendall(head + b"\\r\\n\\r\\n")
                    self.connection.sendall(self.ws.send(AcceptConnection()))
                elif isinstance(event, TextMessage):
                    self.answer(json.loads(event.data))


with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        session = Session(server.accept()[0])
        threading.Thread(target=session.run, daemon=True).start()
'''

PIPES = """
import json, os, subprocess, sys, time

MODE = os.environ.get("MODE", "")
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
count = 0


def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()


for line in sys.stdin:
    asked = json.loads(line)
    number = asked.get("id")
    if asked.get("method") == "initialize":
        say({"jsonrpc": "2.0", "id": number, "result": {"protocolVersion": "2025-06-18"}})
    elif asked.get("method") == "tools/list":
        name = "add it" if MODE == "named" else "add"
        tools = [{"name": name, "inputSchema": SCHEMA}] * (2 if MODE == "twice" else 1)
        say({"jsonrpc": "2.0", "id": 77, "method": "roots/list"})
        say({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "hello"}})
        result = {"tools": {} if MODE == "none" else tools}
        if MODE == "pages":  # each is small enough
            page = asked["params"].get("cursor", "") + "a"
            tool = {"name": page, "inputSchema": SCHEMA, "description": "x" * 40_000}
            result = {"tools": [tool], "nextCursor": page}
        say({"jsonrpc": "2.0", "id": number, "result": result})
    elif asked.get("method") == "tools/call":
        count += 1
        text = str(asked["params"]["arguments"].get("x", ""))
        text += "!" * count * (MODE != "stateless")
        if MODE == "hang":
            time.sleep(600)
        elif MODE == "deaf":
            os.close(0)
            time.sleep(600)
        elif MODE == "die":
            print("I am lost", file=sys.stderr)
            sys.exit(4)
        elif MODE == "red":
            print("\\x1b[31mlost", file=sys.stderr)
            sys.exit(4)
        elif MODE == "leave":  # a process of its own keeps the pipes
            left = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
            print(left.pid, file=sys.stderr)
            sys.exit(5)
        elif MODE == "large":
            text = "x" * 10_000_000
        elif MODE == "flood":
            while True:
                say({"jsonrpc": "2.0", "method": "notifications/message"})
        elif MODE == "utf8":
            sys.stdout.buffer.write(b'{"result": "\\xff\\xfe"}\\n')
        elif MODE == "other":
            number += 1
        elif MODE == "control":
            text = "\\x1b[31m\\x00red>"
        elif MODE == "dice":
            text = str(os.getpid())
        if MODE == "refuse" or "x" not in asked["params"]["arguments"]:
            error = {"code": -32602, "message": "bad arguments"}
            say({"jsonrpc": "2.0", "id": number, "error": error})
        elif MODE == "raise":
            result = {"content": [{"type": "text", "text": "KeyError: 'x'"}], "isError": True}
            say({"jsonrpc": "2.0", "id": number, "result": result})
        elif MODE == "content":
            say({"jsonrpc": "2.0", "id": number, "result": {"content": "text"}})
        else:
            content = [{"type": "text", "text": text}]
            content += [{"type": "image", "data": "AAAA"}] * (MODE == "image")
            say({"jsonrpc": "2.0", "id": number, "result": {"content": content}})
"""


def write(folder: Path, patch: pytest.MonkeyPatch, source: str, *given: str, **file: Any) -> None:
    """Write the server `here` and its file into a folder, where environments find it."""
    (folder / "server.py").write_text(source)
    variables = {"MODE": file.pop("mode", ""), "PYTHONPATH": ":".join(filter(None, sys.path))}
    entries = {
        "command": [sys.executable, str(folder / "server.py"), *given],
        "folder": str(folder),
        "variables": variables,
        **file,
    }
    lines = [f"{key} = {_toml(value)}" for key, value in entries.items() if value is not None]
    (folder / "here.toml").write_text("\n".join(lines))
    patch.setenv(FOLDER_VARIABLE, str(folder))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def options(folder: Path, **others: Any) -> dict[str, Any]:
    rows = [{"prompt": f"{n}*{n}?", "answer": str(n * n)} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"server": "here", "path": str(folder / "rows.jsonl"), "grader": "number", **others}


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def game(
    folder: Path, patch: pytest.MonkeyPatch, mode: str = "", *, file: Any = None, **options: Any
) -> Environment:
    """The environment `openenv` with a game that asks for a number."""
    write(folder, patch, GAME, "{port}", mode=mode, **(file or {}))
    shown = {"task": "{text}", "answer": "{number}", "observation": "{text}"}
    given = {"server": "here", "action": "message", "turns": 3, **shown, **options}
    return load("openenv", "1", given)
