"""The agent: a program, started once per task, that finds its model in the environment. It may be in any language."""

import json
import os
import urllib.request


def ask(question: str) -> str:
    """The model's answer."""
    body = {"model": os.environ["AGL_MODEL"], "messages": [{"role": "user", "content": question}], "max_tokens": 24}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


if __name__ == "__main__":
    with open(os.environ["AGL_TASK"], encoding="utf-8") as file:
        task = json.load(file)
    reward = float(task["answer"].lower() in ask(task["question"]).lower())
    print(json.dumps({"reward": reward}))  # the last line of output is the reward
