"""The demo's agents against a scripted model: what they send, when they stop, what they return."""

from __future__ import annotations

from random import Random

import pytest

from agentlightning.demo import sql, tasks
from agentlightning.demo.tasks import DemoTask

TASKS = [pytest.param(tasks.load(name), id=name) for name in tasks.NAMES]


def assistant_texts(messages: list[tasks.Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("task", TASKS)
async def test_an_agent_that_acts_like_the_demonstrator_has_the_same_conversation_and_success(task: DemoTask, llm):
    rng = Random(5)
    for _ in range(30):
        row = task.sample(rng, "train")
        conversation = task.demonstrate(row, rng)
        llm.play(*assistant_texts(conversation))

        reward = await task.solve(row, llm)

        assert reward == float(conversation[-1]["content"] == f"Answer: {row['answer']}")
        assert llm.requests[-1]["messages"] == conversation[:-1]


@pytest.mark.parametrize("task", TASKS)
async def test_each_prompt_begins_with_the_messages_before_and_names_model_and_limit(task: DemoTask, llm):
    row = task.sample(Random(1), "test")
    opening, closing = task.SPECIAL_WORDS
    llm.play(f"{opening}.schema{closing}", f"Answer: {row['answer']}")

    assert await task.solve(row, llm) == 1.0

    first, second = llm.requests
    assert first["messages"] == [{"role": "user", "content": row["question"]}]
    assert second["messages"][:2] == [
        *first["messages"],
        {"role": "assistant", "content": f"{opening}.schema{closing}"},
    ]
    assert second["messages"][2]["role"] == "user"
    assert second["messages"][2]["content"]
    assert {request["model"] for request in llm.requests} == {"policy"}
    assert all(request["max_tokens"] <= 30 for request in llm.requests)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "text", ["", "Answer:", "Answer: ", "nonsense", "{open}unclosed", "{open}{close} more", "answer: {right}"]
)
async def test_a_malformed_message_ends_the_rollout_with_nothing(task: DemoTask, text: str, llm):
    row = task.sample(Random(2), "train")
    opening, closing = task.SPECIAL_WORDS
    llm.play(text.format(open=opening, close=closing, right=row["answer"]))

    assert await task.solve(row, llm) == 0.0
    assert len(llm.requests) == 1


@pytest.mark.parametrize("task", TASKS)
async def test_a_message_cut_at_the_token_limit_ends_the_rollout_even_if_it_reads_as_right(task: DemoTask, llm):
    row = task.sample(Random(3), "train")
    llm.play(f"Answer: {row['answer']}", finish_reason="length")

    assert await task.solve(row, llm) == 0.0


@pytest.mark.parametrize("task", TASKS)
async def test_an_agent_that_never_answers_stops_at_its_limit_of_calls(task: DemoTask, llm):
    row = task.sample(Random(4), "train")
    opening, closing = task.SPECIAL_WORDS
    llm.play(*[f"{opening}again{closing}"] * 10)

    assert await task.solve(row, llm) == 0.0
    assert len(llm.requests) == task.MAX_CALLS


async def test_the_sql_agent_reads_the_schema_queries_and_answers(llm):
    row = next(r for r in tasks.rows(sql, "test", 50, 0) if r["plan"]["select"] == "count(*)")
    company = sql.database(row["database"])
    query = sql.write_query(row["plan"], *sql.names(company))
    company.close()
    llm.play("<sql>.schema</sql>", f"<sql>{query}</sql>", f"Answer: {row['answer']}")

    assert await sql.solve(row, llm) == 1.0
    assert llm.requests[2]["messages"][-1] == {"role": "user", "content": row["answer"]}
