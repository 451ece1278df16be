import asyncio
from pathlib import Path

import pytest

from agentlightning.errors import InputError
from agentlightning.trainer.supervisor import Supervisor


async def test_a_child_that_fails_is_seen_by_a_watch_that_follows_another(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, "memory://")
    first = asyncio.ensure_future(supervisor.watch())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    arguments = ["--server", "http://127.0.0.1:9", "--run", "run", "--agent", str(tmp_path / "nowhere.py:solve")]
    try:
        supervisor.start_workers(1, arguments, "a token")
        with pytest.raises(InputError, match=r"worker-0 could not start: .*nowhere\.py' does not exist"):
            await asyncio.wait_for(supervisor.watch(), 60)
    finally:
        await supervisor.stop()
