"""An agent of two calls, the second continues the first, for prompts of verl's: its reward is the share of letters."""

from __future__ import annotations

import httpx

LETTERS = set("abcdefghijklmnopqrstuvwxyz")


def solve(task, llm):
    messages, said = list(task["raw_prompt"]), ""
    for _ in range(2):
        answer = httpx.post(
            f"{llm.base_url}/chat/completions",
            json={"model": llm.model, "messages": messages},
            headers={"Authorization": f"Bearer {llm.api_key}"},
            timeout=60,
        )
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        said += message["content"] or ""
        messages += [message, {"role": "user", "content": "more"}]
    return sum(letter in LETTERS for letter in said) / max(len(said), 1)
