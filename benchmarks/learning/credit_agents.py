"""Runs the agents of the credit claims in one process: all rollouts of a step at a time, and forks of them.

An agent's coroutine stops where it awaits a completion, which the scheduler samples together with those of all others. A
fork starts the agent again and answers its first calls from the record. Knows no rewards and no learning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace, coroutine
from typing import Any

from credit_tasks import DECIDES
from transformers import AutoTokenizer

from agentlightning.demo.tiny_model import END
from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.scheduler import SamplingRequest, Scheduler
from agentlightning.records import JSON, Call, Sampling
from agentlightning.training_types import Trajectory, Transition

MAX_NUM_SEQS = 256
CONTEXT = 768
UNNAMED = "policy"
"""Model name of agents that have no name of their own."""

Messages = list[dict[str, str]]
Solve = Callable[[JSON, Any], Awaitable[float]]


@dataclass(slots=True)
class _Call:
    """One call: what was asked, and, once it is sampled, the completion."""

    agent: str | None
    messages: Messages
    max_tokens: int
    parent: _Call | None
    suffix_ids: list[int]
    prompt_ids: list[int]
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    earned: float = 0.0
    decides: bool = False

    @property
    def added(self) -> list[JSON]:
        """Messages that its parent did not have."""
        return [dict(one) for one in self.messages[len(self.parent.messages) + 1 if self.parent else 0 :]]


class Words:
    """A tokenizer as conversations need it."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        (self.end,) = self._tokenizer.convert_tokens_to_ids([END])

    def encode(self, messages: Messages) -> list[int]:
        """The messages, and the beginning of the assistant's next one."""
        text = "".join(f"<|{one['role']}|>{one['content']}{END}" for one in messages) + "<|assistant|>"
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([one for one in ids if one != self.end]))


class Execution:
    """One rollout: an agent, from its start to its reward. It looks to the agent like its model.

    `record`: the rollout of which it is a fork, and `calls`, how many of its calls to answer from it. With `to_the_end`
    False it ends once its reward is decided.
    """

    def __init__(
        self, name: str, task: JSON, solve: Solve, words: Words, record: Execution | None = None, calls: int = 0
    ) -> None:
        self.name, self.task, self.calls = name, task, list[_Call]()
        self.replayed, self._origin = calls, record.name if record else ""
        self.reward: float | None = None
        self.to_the_end = True
        self._decided: float | None = None
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=self))
        self._words, self._solve = words, solve
        self._run: Any = solve(task, self)
        self._send(None)
        for place in range(calls):
            assert record is not None
            recorded = record.calls[place]
            if self.waiting is None or self.waiting.prompt_ids != recorded.prompt_ids:
                raise RuntimeError(f"{name}: the agent went on otherwise than recorded after {place} calls")
            self.answer(recorded.sampled_ids, recorded.logprobs)

    @property
    def waiting(self) -> _Call | None:
        """The call that is to be sampled; None once the agent has ended."""
        return self.calls[-1] if self.reward is None else None

    def fork(self, name: str, calls: int) -> Execution:
        """The same agent, back in the state before its call of that number."""
        return Execution(name, self.task, self._solve, self._words, self, calls)

    def answer(self, sampled: list[int], logprobs: list[float]) -> None:
        """Gives the agent the completion that it waits for, and lets it go on to its next call or its end."""
        call = self.calls[-1]
        call.sampled_ids, call.logprobs, call.text = sampled, logprobs, self._words.decode(sampled)
        stopped = bool(sampled) and sampled[-1] == self._words.end
        message, reason = SimpleNamespace(content=call.text), "stop" if stopped else "length"
        self._send(SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=reason)]))

    def trajectory(self, *, steps: bool) -> Trajectory:
        """The record, without the calls that were replayed; with `steps`, with the step rewards that its calls earned."""
        made: dict[int, Transition] = {}
        for place, call in enumerate(self.calls):
            made[id(call)] = Transition(
                call_id=f"{self.name}/{place:02}",
                suffix_ids=call.suffix_ids,
                sampled_ids=call.sampled_ids,
                logprobs=call.logprobs,
                versions=[],
                agent=call.agent,
                reward=call.earned if steps else 0.0,
                rewards={DECIDES: 1.0} if call.decides else {},
                messages=call.added,
                completion={"role": "assistant", "content": call.text},
                parent=made[id(call.parent)] if call.parent else None,
            )
        return Trajectory(
            rollout_id=self.name,
            group_id=self.name.rpartition("/")[0],
            reward=self.reward or 0.0,
            transitions=list(made.values())[self.replayed :],
            replayed={f"{self.name}/{place:02}": f"{self._origin}/{place:02}" for place in range(self.replayed)},
        )

    def stored(self) -> list[Call]:
        """The calls as a store has them, as far as AIR's rules read them."""
        place = {id(call): number for number, call in enumerate(self.calls)}
        return [
            Call(
                id=f"{self.name}/{number:02}",
                run_id="credit",
                rollout_id=self.name,
                attempt=1,
                parent_id=f"{self.name}/{place[id(call.parent)]:02}" if call.parent else None,
                suffix_ids=call.suffix_ids,
                sampled_ids=call.sampled_ids,
                logprobs=call.logprobs,
                versions=[],
                prompt_tokens=len(call.prompt_ids),
                policy=DEFAULT_POLICY,
                model=UNNAMED,
                protocol="chat",
                sampling=Sampling(),
                history_hash="",
                request_hash="",
                messages=call.added,
                completion={"role": "assistant", "content": call.text},
                agent=call.agent,
            )
            for number, call in enumerate(self.calls)
        ]

    # --- what the agent sees ------------------------------------------------------------------------------------------

    async def create(self, *, model: str, messages: Messages, max_tokens: int) -> Any:
        return await _sampled(self._asked(model, list(messages), max_tokens))  # agents go on with their own list

    def earn(self, reward: float) -> None:
        self.calls[-1].earned += reward

    def decide(self, reward: float) -> None:
        self.calls[-1].decides = True
        self._decided = reward

    def _asked(self, model: str, messages: Messages, max_tokens: int) -> _Call:
        parent = next((one for one in reversed(self.calls) if _continues(messages, one)), None)
        suffix = self._words.encode(messages[len(parent.messages) + 1 if parent else 0 :])
        before = [*parent.prompt_ids, *parent.sampled_ids] if parent else []
        if parent and parent.sampled_ids[-1] != self._words.end:
            suffix = [self._words.end, *suffix]  # it was cut off: the conversation goes on behind its end
        agent = None if model == UNNAMED else model
        return _Call(agent, messages, max_tokens, parent, suffix, before + suffix)

    def _send(self, reply: Any) -> None:
        try:
            call = self._run.send(reply)
        except StopIteration as ended:
            self.reward = float(ended.value)
            return
        decided = None if self.to_the_end else self._decided
        if decided is not None or len(call.prompt_ids) + call.max_tokens > CONTEXT:
            self._run.close()
            self.reward = decided or 0.0
            return
        self.calls.append(call)


@coroutine
def _sampled(call: _Call) -> Generator[_Call, Any, Any]:
    """A completion, which whoever sends the agent's coroutine forward gives it."""
    return (yield call)


def _continues(messages: Messages, call: _Call) -> bool:
    length = len(call.messages)
    return (
        len(messages) > length
        and messages[length] == {"role": "assistant", "content": call.text}
        and messages[:length] == call.messages
    )


class Sampler:
    """Samples for any number of executions at a time, and counts the tokens."""

    def __init__(self, model: Path, seed: int) -> None:
        self.words = Words(model)
        self._seed = seed
        self._scheduler = Scheduler(open_decoder(model), max_num_seqs=MAX_NUM_SEQS, decode_text=self.words.decode)

    def load(self, weights: Path, version: str) -> None:
        self._scheduler.load(weights, version)

    def play(self, executions: Sequence[Execution], temperature: float) -> int:
        """Lets all of them end; returns the tokens read and sampled, those of replayed calls not counted."""
        of: dict[int, tuple[SamplingRequest, Execution]] = {}
        tokens = 0

        def submit(execution: Execution) -> None:
            if call := execution.waiting:
                request = SamplingRequest(
                    prompt=call.prompt_ids,
                    max_tokens=call.max_tokens,
                    temperature=temperature,
                    seed=Random(f"{self._seed} {execution.name} {len(execution.calls)}").getrandbits(60),
                    stop_ids=frozenset([self.words.end]),
                )
                of[id(request)] = request, execution
                self._scheduler.submit(request)

        for one in executions:
            submit(one)
        while self._scheduler.busy:
            for request in self._scheduler.turn():
                if request.finish is None:
                    continue
                _, execution = of.pop(id(request))
                tokens += len(execution.calls[-1].suffix_ids) + len(request.sampled)
                execution.answer(request.sampled, request.logprobs)
                submit(execution)
        return tokens
