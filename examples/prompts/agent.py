"""An agent as it was before anybody thought of its prompt: it answers one question over the OpenAI protocol, and prints.

It imports nothing of this project. Where its model is, the variables say that every OpenAI client reads.
"""

import json
import os
import urllib.request

SYSTEM = "answer in small letters"


def ask(question):
    """The model's answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": "policy", "messages": messages, "max_tokens": 8, "temperature": 0}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    with open(os.environ["AGL_TASK"]) as file:
        print(ask(json.load(file)["question"]))
