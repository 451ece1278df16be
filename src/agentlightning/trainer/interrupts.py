"""Interrupts: long work that ends early, because of Ctrl-C, of a signal, or of a watch that fails.

`Trainer` and the command line run all long work by it, so that a script, a notebook and a terminal end a run alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

T = TypeVar("T")


def run_interruptible(work: Callable[[], Coroutine[Any, Any, T]], *interrupts: Callable[[], object]) -> T:
    """Run a coroutine in a thread of its own; returns what it returns.

    Each Ctrl-C, SIGTERM or SIGHUP calls one of `interrupts`, then cancels, then raises KeyboardInterrupt here. A signal
    that the program handles or ignores itself is left to it.
    """
    outcome: Future[T] = Future()
    left = [*interrupts]

    async def main() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                loop.call_soon_threadsafe(task.cancel)

        left.append(cancel)
        return await work()

    def interrupt(*_: object) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    def target() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:  # raised where the caller waits
            outcome.set_exception(error)

    thread = threading.Thread(target=target, name="trainer")
    with _signals_call(interrupt):
        thread.start()
        while not outcome.done():
            try:
                wait([outcome])
            except KeyboardInterrupt:  # of a handler of the program's own, or the last of ours
                interrupt()
        thread.join()
    try:
        return outcome.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def run_watched(work: Coroutine[Any, Any, T], *watches: Awaitable[object]) -> T:
    """Await `work`; raises the error of the first watch that fails meanwhile, and cancels the work. Ends the watches."""
    task, *others = [asyncio.ensure_future(one) for one in (work, *watches)]
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            for one in others:
                if one.done():
                    one.result()
        return cast(T, await task)
    finally:
        for each in (task, *others):
            each.cancel()
        await asyncio.gather(task, *others, return_exceptions=True)


@contextlib.contextmanager
def _signals_call(handler: Callable[..., None]) -> Iterator[None]:
    """Meanwhile signals that would end the program call this, one also while it runs; only a main thread can ask for it.

    Raising KeyboardInterrupt instead would cut short what the signal before began.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if main}
    ours = [one for one, handled in before.items() if handled in (signal.SIG_DFL, signal.default_int_handler)]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
