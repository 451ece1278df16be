"""The work of benchmarks/store.py on agentlightning 0.3.0: run by it, in a virtual environment that has that version.

    v03.py serve PORT   its store in memory behind its server, until standard input ends
    v03.py work         for each line on standard input, a JSON object, the seconds that its work took

An object says {"way", "url", "count", "workers", "attributes"}; the URL `memory` is its store in this process. The way is
how a worker adds the spans of a rollout: `each` awaits one after the other, `together` all at once, `many` in one call.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import agentlightning as agl
from agentlightning.types import Span


def span(rollout_id: str, attempt_id: str, number: int, attributes: dict[str, Any]) -> Span:
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=number,
        name="openai.chat.completion",
    )


async def work(way: str, url: str, count: int, workers: int, attributes: list[dict[str, Any]]) -> float:
    """Enqueue, then claim, add the spans, finish."""
    memory = agl.InMemoryLightningStore() if url == "memory" else None

    def connect() -> Any:
        return memory or agl.LightningStoreClient(url)

    store = connect()
    for number in range(count):
        await store.enqueue_rollout(input={"number": number})

    async def one() -> int:
        mine = connect()
        done = 0
        while (claimed := await mine.dequeue_rollout()) is not None:
            place = claimed.rollout_id, claimed.attempt.attempt_id
            spans = [span(*place, number + 1, each) for number, each in enumerate(attributes)]
            if way == "each":
                for each in spans:
                    await mine.add_span(each)
            elif way == "together":
                await asyncio.gather(*[mine.add_span(each) for each in spans])
            else:
                await mine.add_many_spans(spans)
            await mine.update_attempt(*place, status="succeeded")
            done += 1
        if mine is not store:
            await mine.close()
        return done

    began = time.perf_counter()
    done = await asyncio.gather(*[one() for _ in range(workers)])
    seconds = time.perf_counter() - began
    assert sum(done) == count, done
    found = [each.rollout_id for each in await store.query_rollouts(limit=3)]
    assert [len(await store.query_spans(rollout_id)) for rollout_id in found] == [len(attributes)] * len(found)
    if memory is None:
        await store.close()
    return seconds


async def serve(port: int) -> None:
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), host="127.0.0.1", port=port)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


def main() -> None:
    if sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2])))
        return
    for line in sys.stdin:
        print(asyncio.run(work(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
