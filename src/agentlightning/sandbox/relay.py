"""The first process inside a sandbox: starts the agent's program and carries its connections to the gateway.

Run as a file: ``python3 relay.py PORT SOCKET RLIMITS PROGRAM ARGUMENT…``. A sandbox has no network but its own loopback:
what connects to 127.0.0.1:PORT there is passed on to the Unix socket SOCKET, behind which the worker stands. A byte on
standard input has the program told to end (SIGTERM); its end is the worker's, and ends the sandbox. Exits as the program
does, by the convention of shells: 128 + signal. Without a program it only tries what it needs. Only the standard library,
and a Python as old as an image may have (3.8).
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys

CHUNK_BYTES = 64 * 1024
MAX_CONNECTIONS = 64
"""At a time; further ones wait. The worker bounds them as well: nothing in here can be relied on."""
CANNOT_START = 127


def limit(given: str) -> None:
    """Set limits, ``NAME=NUMBER,…``: what is started from here on cannot raise them."""
    for one in filter(None, given.split(",")):
        name, _, number = one.partition("=")
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(number), int(number)))


async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Carry bytes one way: a slow reader holds up its own sender only."""
    while data := await source.read(CHUNK_BYTES):
        target.write(data)
        await target.drain()
    target.write_eof()


async def carry(
    path: str, places: asyncio.Semaphore, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
) -> None:
    """Carry one connection of the program to the worker."""
    ends = [to_client]
    try:
        async with places:
            server, to_server = await asyncio.open_unix_connection(path)
            ends.append(to_server)
            await asyncio.gather(copy(client, to_server), copy(server, to_client))
    except OSError:
        pass  # the worker is away: the program sees a connection that closes
    finally:
        for end in ends:
            end.transport.abort()


def reap(program: subprocess.Popen[bytes], ended: asyncio.Future[int]) -> None:
    """Reap whatever ended, orphans too; the program's exit code goes to `ended`."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == program.pid and not ended.done():
            ended.set_result(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def obey(program: subprocess.Popen[bytes], ended: asyncio.Future[int]) -> None:
    """The worker said something: a byte tells the program to end, the end of the pipe ends the sandbox."""
    if os.read(sys.stdin.fileno(), 1):
        os.killpg(program.pid, signal.SIGTERM)
    elif not ended.done():
        ended.set_result(128 + signal.SIGKILL)


async def main(port: int, path: str, rlimits: str, arguments: list[str]) -> int:
    """Run the program to its end."""
    loop = asyncio.get_event_loop()
    places = asyncio.Semaphore(MAX_CONNECTIONS)
    await asyncio.start_server(lambda *ends: carry(path, places, *ends), "127.0.0.1", port, backlog=128)
    os.makedirs(os.environ.get("HOME", "/"), exist_ok=True)
    if not arguments:
        return 0
    ended: asyncio.Future[int] = loop.create_future()
    try:
        program = subprocess.Popen(  # noqa: ASYNC220 (nothing else has to go on meanwhile)
            arguments, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: limit(rlimits)
        )
    except (OSError, subprocess.SubprocessError) as cause:
        sys.stderr.write(f"program {arguments[0]!r} cannot be started: {cause}\n")
        sys.stderr.flush()
        return CANNOT_START
    loop.add_signal_handler(signal.SIGCHLD, reap, program, ended)
    loop.add_reader(sys.stdin.fileno(), obey, program, ended)
    reap(program, ended)  # it may have ended before its signal was listened for
    return await ended


if __name__ == "__main__":
    code = asyncio.new_event_loop().run_until_complete(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
    os._exit(code)  # the end of the first process ends all others, in a namespace of its own
