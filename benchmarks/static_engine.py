"""The one response of the static engine of the gateway's benchmark, and its tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PROMPT_IDS, SAMPLED_IDS = 512, 128

TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE that cuts the prompts into pieces of about four characters; <|im_end|>, id 1, ends an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(seed, 4000) for seed in range(8)], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return folder


def write_answers(folder: Path, tokenizer_folder: Path) -> None:
    """Writes the engine's response on each path: the same ids and log-probabilities, in vLLM's formats."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = [*tokenizer.encode(prose(9, 4000)).ids[: SAMPLED_IDS - 1], tokenizer.token_to_id("<|im_end|>")]
    prompt = tokenizer.encode(prose(10, 8000)).ids[:PROMPT_IDS]
    draw = random.Random(7)
    logprobs = [-draw.expovariate(1.0) for _ in ids]
    texts = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
    content = [
        {"token": f"token_id:{one}", "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for one, logprob, text in zip(ids, logprobs, texts, strict=True)
    ]
    choice = {"index": 0, "finish_reason": "stop", "stop_reason": None}
    generate = {"request_id": "static", "prompt_logprobs": None}  # vLLM shows the prompt to those who ask
    whole = {**choice, "logprobs": {"content": content}, "token_ids": ids}
    message = {"role": "assistant", "content": tokenizer.decode(ids)}
    named = [{**one, "token": text} for one, text in zip(content, texts, strict=True)]
    chat = {
        "id": "chatcmpl-static",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "outside",
        "choices": [{**choice, "message": message, "logprobs": {"content": named}, "token_ids": ids}],
        "usage": {
            "prompt_tokens": PROMPT_IDS,
            "completion_tokens": SAMPLED_IDS,
            "total_tokens": PROMPT_IDS + SAMPLED_IDS,
        },
        "prompt_token_ids": prompt,
    }
    events = [
        {
            "request_id": "static",
            "choices": [
                {**choice, "finish_reason": reason, "logprobs": {"content": [one]}, "token_ids": [token]},
            ],
        }
        for one, token, reason in zip(content, ids, [None] * (SAMPLED_IDS - 1) + ["stop"], strict=True)
    ]
    folder.mkdir()
    (folder / "generate.json").write_text(json.dumps({**generate, "choices": [whole]}))
    (folder / "chat.json").write_text(json.dumps(chat))
    lines = [json.dumps(event, separators=(",", ":")) for event in events] + ["[DONE]"]
    (folder / "generate.sse").write_text("".join(f"data: {line}\n\n" for line in lines))


def prose(seed: int, length: int) -> str:
    """So many characters of words that nobody knows."""
    draw = random.Random(7)
    words = ["".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(1 + n % 3)) for n in range(600)]
    draw = random.Random(seed)
    text = ""
    while len(text) < length:
        text += draw.choice(words) + draw.choice("     ,.").strip() + " "
    return text[:length].strip()
