"""Interrupts: a coroutine run to its end in a thread of its own, while Ctrl-C and signals to end are heard.

`Trainer` and the command line run all long work by it, so that a script, a notebook and a terminal end a run alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptible(work: Callable[[], Coroutine[Any, Any, T]], *interrupts: Callable[[], object]) -> T:
    """Run a coroutine in a thread of its own; returns what it returns.

    Each Ctrl-C, SIGTERM or SIGHUP calls one of `interrupts`, then cancels, then raises KeyboardInterrupt here. A signal
    that the program handles or ignores itself is left to it.
    """
    outcome: Future[T] = Future()
    cancels: list[Callable[[], object]] = []

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        cancels.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await work()

    def target() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:  # raised where the caller waits
            outcome.set_exception(error)

    thread = threading.Thread(target=target, name="trainer")
    left = [*interrupts]
    with _signals_as_ctrl_c():
        thread.start()
        while not outcome.done():
            try:
                wait([outcome])
            except KeyboardInterrupt:
                if left:
                    left.pop(0)()
                elif cancels:
                    with contextlib.suppress(RuntimeError):  # it has just ended by itself
                        cancels.pop()()
                else:
                    raise
        thread.join()
    try:
        return outcome.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def _signals_as_ctrl_c() -> Iterator[None]:
    """Meanwhile signals that would end the process at once raise KeyboardInterrupt; only a main thread can ask for it."""
    main = threading.current_thread() is threading.main_thread()
    deadly = [one for one in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(one) is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)
