"""A store for the console's tests: two runs of three steps, groups, retries, sub-agents, spans, and texts that attack."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import build
from agentlightning.console.app import draw, view
from agentlightning.console.reader import Reader
from agentlightning.console.render import Templates
from agentlightning.records import (
    Call,
    Checkpoint,
    Claim,
    Finish,
    Metric,
    NewRollout,
    Resource,
    Reward,
    Span,
    VersionSpan,
    WorkerStatus,
)
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.store.scan import feedback_span
from agentlightning.store.templates import CandidateRecord

ATTACKS = (
    "<script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">',
    "</pre></div><svg onload=window.pwned=1>",
    "[click](javascript:window.pwned=1) ![pixel](https://evil.invalid/pixel.png)",
    "${window.pwned = 1} {{constructor.constructor('window.pwned = 1')()}} `${1}`",
    "<a href=javascript:window.pwned=1>link</a> &lt;b&gt; \u202ereversed \x1b[2J",
)
ATTACK = " ".join(ATTACKS)
STEPS = 3
GROUP = 4
SECOND = 10**9
AGENTS = ("planner", f"writer {ATTACKS[1]}")


class Parsed(HTMLParser):
    """HTML as a browser's parser takes it: names of elements, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, name: str) -> list[str]:
        """Values of an attribute, of any element."""
        return [value for _, key, value in self.attributes if key == name]


TEMPLATES = Templates()


def check_harmless(html: str) -> Parsed:
    """Nothing in it runs but the console's own script, and nothing leads or loads anywhere."""
    parsed = Parsed(html)
    assert not {"img", "iframe", "object", "embed", "base"} & set(parsed.names)
    assert [name for _, name, _ in parsed.attributes if name.startswith("on") or name in ("style", "srcdoc")] == []
    sources = [value.partition("?")[0] for value in parsed.values("src")]
    assert parsed.names.count("script") == len(sources)
    assert set(sources) <= {"/static/console.js"}
    for name in ("href", "action"):
        assert [value for value in parsed.values(name) if not re.match(r"/(?!/)|[?#]", value)] == []
    return parsed


async def shown(reader: Reader, path: str, **query: str | list[str]) -> Parsed:
    """The page of an address; whatever keeps it from being shown is raised. Without its sidebar, nothing on it is unsafe."""
    given = {name: [value] if isinstance(value, str) else value for name, value in query.items()}
    await view(reader, TEMPLATES, path, given)
    html, status = await draw(reader, TEMPLATES, path, given)
    assert status == 200
    check_harmless(html)
    return Parsed(html[html.index("<main") :])


def settings(seed: int, rate: float, agent: str) -> dict[str, Any]:
    return {"trainer": {"seed": seed, "steps": STEPS, "learning_rate": rate}, "agent": {"run": agent}}


async def fill(store: LightningStore) -> None:
    """Run "alpha" learns; "beta" differs by its seed, "gamma" by its rate, and is named by an attacker."""
    for run_id, name, seed, rate in (("alpha", "demo", 0, 1e-3), ("beta", "demo", 1, 1e-3), ("gamma", ATTACK, 0, 1e-2)):
        await store.create_run(name, settings(seed, rate, name), run_id)
        for step in range(1, STEPS + 1):
            await _step(store, run_id, step)
            reward = 0.2 * step + 0.01 * seed
            await store.log_metrics(
                [
                    Metric(run_id=run_id, step=step, name=metric, value=value)
                    for metric, value in {
                        "train/reward_mean": reward,
                        "eval/greedy/reward_mean": reward + 0.1,
                        "policy/entropy": 1.0 / step,
                        "policy/kl": 0.01 * step,
                        "rollout/count": float(GROUP),
                        "train/tokens_sampled": 100.0,
                        "train/tokens_trained": 80.0,
                        "train/trained_token_share": 0.8,
                        "rollout/turns": 2.0,
                    }.items()
                ]
            )
            await store.update_run(run_id, summary={"step": step, "train/reward_mean": reward})
    alarms = {"entropy_gone": "entropy fell from 1.0 to 0.03 nats per token", "own": ATTACK}
    await store.update_run("alpha", state="finished", summary={"alarms": alarms})
    begun = [{"step": step, "name": ATTACK, "text": ATTACK} for step in (2, STEPS)]
    await store.update_run("gamma", summary={"alarms_begun": begun})
    await register(store, "gamma", 1, 2)
    for number in (1, 2):
        await store.set_alias("gamma", "production", number)
    for name in ("alpha", "gamma"):
        await _versions(store, name, ATTACK if name == "gamma" else "be brief")
    await _planted(store)


SLOW_TOOL = {
    "time/step_s": 10.0,
    "time/collect_s": 8.0,
    "time/prepare_s": 0.2,
    "time/update_s": 1.5,
    "time/publish_s": 0.2,
    "time/record_s": 0.1,
    "rollout/count": 64.0,
    "rollout/queued_s": 0.1,
    "rollout/duration_s": 7.0,
    "rollout/duration_max_s": 8.0,
    "rollout/model_s": 0.9,
    "rollout/between_calls_s": 6.0,
    "rollout/after_calls_s": 0.1,
    "workers/slots": 64.0,
    "workers/busy_share": 0.7,
    "gateway/busy_share": 0.35,
    "sampler/busy_share": 0.3,
    "sampler/calls_mean": 40.0,
    "sampler/slots": 64.0,
    "cost/agent_s": 448.0,
    "cost/sampled_tokens": 900.0,
}
"""Metrics of a step whose agents wait for a tool."""


async def _planted(store: LightningStore) -> None:
    """Run "slow" waits for a tool; "ahead" is the same with agents that run ahead, and takes 40 % less."""
    for run_id, staleness, seconds in (("slow", 0, 10.0), ("ahead", 2, 6.0)):
        config = {
            "model": {"path": "m"},
            "trainer": {"max_staleness": staleness, "steps": STEPS},
            "agent": {"run": ATTACK},
            "monitor": {"tags": ["planted", ATTACKS[0]]},
        }
        await store.create_run(ATTACK, config, run_id)
        row = SLOW_TOOL | {"time/step_s": seconds, "time/collect_s": seconds - 2}
        await store.log_metrics(
            [
                Metric(run_id=run_id, step=step, name=name, value=value)
                for step in range(1, STEPS + 1)
                for name, value in row.items()
            ]
        )
        await store.update_run(run_id, "finished", {"step": STEPS, "eval/greedy/reward_mean": 0.5})


async def _versions(store: LightningStore, run_id: str, text: str) -> None:
    """Two versions of a policy, of which one is a checkpoint, and of a prompt."""
    for version in (1, 2):
        parent = version - 1 or None
        prompt = {"template": f"Answer the question.\n{text * version}"}
        await store.put_resources(
            [
                Resource(
                    run_id=run_id, name="default", kind="policy", value={"model": text}, parent=parent, step=version
                ),
                Resource(run_id=run_id, name=f"writer {text}", kind="prompt_template", value=prompt, parent=parent),
            ]
        )
    proposals = [
        CandidateRecord(number=0, texts={"writer": text}, versions={f"writer {text}": 1}),
        CandidateRecord(number=None, texts={"writer": f"{text}!"}, source=text, refused=text),
    ]
    await store.put_resources([one.resource(run_id) for one in proposals])
    await store.put_checkpoint(Checkpoint(run_id=run_id, step=2, path=f"/runs/{text}", version=2))


async def register(store: LightningStore, run_id: str, *steps: int) -> None:
    """Versions ``support@STEP`` of run "alpha", ``gamma@STEP`` of "gamma"."""
    for step in steps:
        version = ModelVersion(
            name="support" if run_id == "alpha" else run_id,
            number=0,
            run_id=run_id,
            policy="default",
            step=step,
            resource_version=step,
            parent=None,
            base_model="base",
            weights={"kind": "full", "url": "file:///runs/alpha"},
            metrics={"eval/greedy/reward": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 300}},
            licence=ATTACK,
        )
        await store.register_model(version)


async def _step(store: LightningStore, run_id: str, step: int) -> None:
    text = ATTACK if run_id == "gamma" else "what is 2 + 3 ?"
    queued = [
        NewRollout(run_id=run_id, task={"question": text}, group_id=f"{step}-0", replica=replica, step=step)
        for replica in range(GROUP)
    ]
    await store.enqueue(queued)
    worker = WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)
    for claim in await store.claim(worker, limit=GROUP):
        await record(store, claim, text)
        value = claim.rollout.replica / (GROUP - 1)
        rewards = (_reward(claim, value), _reward(claim, value / 2, "style", f"{claim.rollout.id}-0"))
        failed = run_id == "gamma" and claim.rollout.replica == 0
        state, error = ("failed", f"Traceback\nValueError: {ATTACK}") if failed else ("succeeded", None)
        await store.finish([Finish(lease=claim.lease, state=state, rewards=() if failed else rewards, error=error)])  # type: ignore[arg-type]


async def record(store: LightningStore, claim: Claim, text: str) -> None:
    """Two calls of two sub-agents and a tool's span between them."""
    started = 1_800_000_000 * SECOND
    calls = [a_call(claim, number, text, started) for number in range(2)]
    await store.append_calls(calls)
    span_id = f"{claim.rollout.id}.{claim.lease.attempt}.00000000000000aa"
    span = Span(
        id=span_id,
        run_id=claim.rollout.run_id,
        rollout_id=claim.rollout.id,
        attempt=claim.lease.attempt,
        name=f"tool {text}",
        attributes={"agl.message": text},
        started_ns=started + SECOND,
        finished_ns=started + 2 * SECOND,
        status="error",
        status_message=text,
    )
    words = feedback_span(claim.rollout, claim.lease.attempt, f"the sum is wrong: {text}")
    await store.append_spans([span, replace(words, started_ns=span.finished_ns, finished_ns=span.finished_ns)])


def a_call(claim: Claim, number: int, text: str, started: int) -> Call:
    rollout = claim.rollout
    asked: list[dict[str, Any]] = [{"role": "user", "content": text}]
    answer: dict[str, Any] = {"role": "assistant", "content": f"5 {text}"}
    if number == 0:
        asked.insert(0, {"role": "system", "content": f"Be brief. {text}"})
        function = {"name": f"calculate {text}", "arguments": '{"sum": "2 + 3"}'}
        answer = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
    else:
        asked = [{"role": "tool", "tool_call_id": "c1", "content": f"5 {text}"}]
    tool = {"type": "function", "function": {"name": f"calculate {text}", "description": text}}
    return build.call(
        claim,
        f"{rollout.id}-{number}",
        parent_id=f"{rollout.id}-{number - 1}" if number else None,
        sampled_ids=[4, 5, 6, 7],
        logprobs=[-0.1, -1.5, -4.0, -9.0],
        versions=[VersionSpan(version=rollout.step, start=0, end=4)],
        prompt_tokens=3 + 7 * number,
        messages=asked,
        completion=answer,
        tools=[tool] if number == 0 else None,
        agent=AGENTS[number] if rollout.run_id == "gamma" else AGENTS[0],
        decoding={"grammar": {"kind": "choice", "lark": "start: A"}, "forced": [[1, 2]]},
        started_ns=started + 2 * number * SECOND,
        finished_ns=started + (2 * number + 1) * SECOND,
    )


def _reward(claim: Claim, value: float, name: str = "reward", call_id: str | None = None) -> Reward:
    source = "emitted" if call_id else "function"
    return build.reward(claim, value, f"{claim.rollout.id}-{name}", name=name, call_id=call_id, source=source)
