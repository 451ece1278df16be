"""A stronger model behind the OpenAI protocol: it answers the lookup demo's questions as they should be answered."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentlightning.demo.lookup import QUESTIONS
from agentlightning.demo.tasks import PEOPLE


def answer(messages: list[dict[str, Any]]) -> str:
    """What the agent should say next: look up the next fact, or tell the last one."""
    person, relations = plan(messages[0]["content"])
    facts = [message["content"] for message in messages[1:] if message["role"] == "user"]
    if len(facts) == len(relations):
        return f"Answer: {facts[-1]}"
    return f"<find>{facts[-1] if facts else person} {relations[len(facts)]}</find>"


def plan(question: str) -> tuple[str, list[str]]:
    """Whom a question starts from, and the relations to follow."""
    for relation, wordings in QUESTIONS.items():
        for wording in wordings:
            pattern = re.escape(wording).replace(re.escape("{who}"), f"(the boss of )?({'|'.join(PEOPLE)})")
            found = re.fullmatch(pattern, question)
            if found is not None:
                return found[2], ["boss", relation] if found[1] else [relation]
    raise ValueError(question)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": answer(request["messages"])}
        body = {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None: ...


@contextmanager
def teacher() -> Iterator[str]:
    """Its URL, up to /v1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
