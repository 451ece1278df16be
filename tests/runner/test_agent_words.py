"""What agents are written against, without a worker."""

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import build
from agentlightning.errors import AgentError, InputError, RewardError
from agentlightning.prompts.rollout_prompts import RolloutPrompts
from agentlightning.prompts.templates import Template
from agentlightning.records import Call, Claim, Sampling
from agentlightning.runner.agent import LLM, emit_reward, is_marked, llm_for, prompt, rollout
from agentlightning.runner.attempt import CURRENT, AttemptContext
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.runner.result import RolloutResult

MESSAGES = [{"role": "user", "content": "{question}"}]


def a_claim() -> Claim:
    return build.claim("r1", attempt=2, sampling=Sampling(temperature=0.5))


def an_llm() -> LLM:
    return llm_for(a_claim(), "http://127.0.0.1:9/", "policy", ConnectionPool())


def a_call(content: object) -> Call:
    return build.call(completion={"role": "assistant", "content": content})


def test_the_llm_of_a_claim_carries_its_identity_in_url_and_key() -> None:
    llm = an_llm()
    assert llm.base_url == "http://127.0.0.1:9/r/r1/2/v1"
    assert llm.anthropic_base_url == "http://127.0.0.1:9/r/r1/2"
    assert (llm.api_key, llm.sampling.temperature) == ("sk-agl-key", 0.5)


def test_a_client_is_closed_with_its_event_loop() -> None:
    llm = an_llm()

    async def use() -> httpx2.AsyncClient:
        client: httpx2.AsyncClient = llm.http_client
        return client

    one, two = asyncio.run(use()), asyncio.run(use())
    assert one is not two
    assert one.is_closed
    assert two.is_closed


def test_threads_share_one_client() -> None:
    llm = an_llm()
    with ThreadPoolExecutor(4) as threads:
        clients = list(threads.map(lambda _: llm.sync_http_client, range(8)))
    assert len(set(map(id, clients))) == 1
    llm.connections.close()
    assert clients[0].is_closed


async def test_ready_clients_share_the_connection_pool() -> None:
    llm = an_llm()
    assert llm.async_openai()._client is llm.async_anthropic()._client is llm.http_client
    assert llm.openai()._client is llm.anthropic()._client is llm.sync_http_client
    assert llm.openai(max_retries=7).max_retries == 7
    assert llm.async_openai().timeout.read == 600  # type: ignore[union-attr]


def test_a_ready_client_of_a_package_that_is_missing_names_it() -> None:
    text = """
import sys
from agentlightning.runner.agent import LLM
sys.modules["anthropic"] = None
try:
    LLM(base_url="http://h/v1", anthropic_base_url="http://h", api_key="k", model="m").anthropic()
except Exception as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert said == "llm: Anthropic needs anthropic; install it with: pip install anthropic\n"


def test_rollout_marks_a_callable_and_returns_it() -> None:
    def solve(task: object, llm: object) -> float:
        return 1.0

    assert not is_marked(solve)
    assert rollout(solve) is solve
    assert rollout()(solve) is solve
    assert is_marked(solve)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
async def test_a_reward_that_is_no_finite_number_is_refused_where_it_is_emitted(value: object) -> None:
    CURRENT.set(AttemptContext(a_claim(), 0.0))
    with pytest.raises(RewardError, match="expected a finite number"):
        emit_reward(value)  # type: ignore[arg-type]


async def test_a_reward_is_refused_outside_an_attempt_after_its_end_and_in_an_endless_loop() -> None:
    with pytest.raises(AgentError, match=r"outside an attempt: call it from an agent"):
        emit_reward(1.0)
    attempt = AttemptContext(a_claim(), 0.0)
    attempt.rewards = [attempt.reward(0.0, "emitted")] * 10_000
    CURRENT.set(attempt)
    with pytest.raises(AgentError, match="at most 10000"):
        emit_reward(1.0)
    attempt.open = False
    with pytest.raises(AgentError, match="its attempt has ended"):
        emit_reward(1.0)


def some_prompts() -> RolloutPrompts:
    templates = {"system": Template.of("Answer {question} in {language}."), "few": Template.of(MESSAGES)}
    return RolloutPrompts({"question": "who?", "language": "English"}, templates, {"system": 3, "few": 1})


async def test_a_prompt_is_found_without_an_llm_within_an_attempt_only() -> None:
    with pytest.raises(AgentError, match=r"outside an attempt.*AGL_PROMPT_SYSTEM"):
        prompt("system")
    CURRENT.set(AttemptContext(a_claim(), 0.0, prompts=some_prompts()))
    assert prompt("system", question="when?") == "Answer when? in English."
    assert prompt("few") == [{"role": "user", "content": "who?"}]


def test_a_prompt_that_cannot_be_rendered_says_which_and_why() -> None:
    prompts = RolloutPrompts({}, {"system": Template.of("{question}")}, {"system": 3})
    with pytest.raises(
        InputError, match="prompt 'other': expected the name of a prompt template of the run, which has system"
    ):
        prompts.render("other")
    with pytest.raises(InputError, match=r"prompt 'system', version 3: placeholder 'question': .* got none"):
        prompts.render("system")


def test_prompts_in_the_environment_are_texts_and_messages_are_json() -> None:
    found = some_prompts().environment()
    assert found["AGL_PROMPT_SYSTEM"] == "Answer who? in English."
    assert json.loads(found["AGL_PROMPT_FEW"]) == [{"role": "user", "content": "who?"}]
    two = {"a-b": Template.of("x"), "a_b": Template.of("y")}
    with pytest.raises(InputError, match=r"'a_b': .* AGL_PROMPT_A_B is another's"):
        RolloutPrompts({}, two, {"a-b": 1, "a_b": 1}).environment()


@pytest.mark.parametrize(
    ("output", "calls", "answer"),
    [
        ("out", [], "out"),
        (None, [], ""),
        (None, [a_call("first"), a_call("last")], "last"),
        (None, [a_call(None)], ""),
        (None, [a_call([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], "ab"),
    ],
)
def test_the_answer_of_a_result_is_the_last_calls_or_the_output(output: object, calls: list[Call], answer: str) -> None:
    assert RolloutResult(output=output, calls=calls).answer == answer


def test_the_worker_process_loads_no_heavy_library() -> None:
    code = (
        "import sys, agentlightning.runner.__main__\n"
        "heavy = {'opentelemetry', 'torch', 'fastapi', 'sqlalchemy', 'transformers', 'starlette', 'openai', 'httpx',\n"
        "'httpx2', 'numpy'}\n"
        "sys.stdout.write(','.join(sorted(heavy & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == ""
