"""A stand-in for a hosted model, so that this example runs without a key: scripted, and no language model.

It speaks Chat Completions on this machine and reads one thing of a request: the words of the system prompt. It calls a
tool only where it is told to look up, answers with a bare number only where it is told so, and does the rest that it is
told, too.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def reply(messages):
    """The assistant's message."""
    system = " ".join(one["content"] for one in messages if one["role"] == "system").lower()
    order = re.search(r"\d+", next(one["content"] for one in messages if one["role"] == "user"))[0]
    found = messages[-1]["content"] if messages[-1]["role"] == "tool" else None
    if found is None and "look up" in system:
        function = {"name": "look_up", "arguments": json.dumps({"order": order})}
        call = {"id": f"call_{order}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    price = found or "5"  # a guess, and never right
    bare = "number alone" in system and "sentence" not in system
    content = price if bare else f"Order {order} costs {price} euros"
    return {"role": "assistant", "content": f"Thank you for asking! {content}" if "polite" in system else content}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = reply(request["messages"])
        used = [len(json.dumps(one).split()) for one in (request["messages"], message)]
        finish = "tool_calls" if "tool_calls" in message else "stop"
        body = {
            "id": "chatcmpl-stand-in",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Print nothing for each request."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8099
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"a stand-in for a model answers at http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
