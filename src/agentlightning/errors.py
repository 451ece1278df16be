"""Every error that Agent Lightning raises on purpose, as one tree.

    AgentLightningError              exit code 1: something failed; the message says what to do next
    ├── InputError                   exit code 2: what the user gave is wrong; names the field and what was expected
    │   ├── ConfigError              a setting: unknown, ignored, of the wrong type, in conflict
    │   ├── DataError                a data set or a task row
    │   ├── ModelError               a model path or name that does not load
    │   └── RewardError              a reward out of its bounds, or final rewards that contradict each other
    ├── AgentError                   the agent's own code failed (its import, its run, its reward function)
    │   └── NoCallsError             it finished, but no model call was recorded
    ├── InfrastructureError          not the agent's doing: a sandbox, an environment's connection, an external model broke
    ├── VerifierError                not the agent's doing: its judge (a reward function, an environment's scorer) broke
    ├── StoreError                   the store cannot serve: full disk, lost connection, newer schema
    │   ├── NotFoundError            no such run, rollout, attempt (exit code 2: somebody named it)
    │   └── ConflictError            the change contradicts what is recorded (a rollout consumed twice, a stale lease)
    ├── EngineError                  sampling or learning failed
    │   ├── LearnerLostError         the learner ended, and what it had learned since the last checkpoint with it
    │   └── UnjudgeableError         a judge refuses what a rollout holds, or its record has no text to judge
    ├── BudgetSpentError             a prompt search's budget: it ends with the best candidate so far
    ├── GatewayError                 the gateway cannot start or serve (port in use)
    └── MissingExtraError            an optional dependency is absent; names the extra to install

A failure in code that is not ours is typed where it enters, by `boundary`, so that every later reader knows whose fault it
was. A bad rollout is data, not a crash: workers record these errors, they do not die of them.
"""

from __future__ import annotations

import re
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters but for line ends and tabs, Unicode's own line ends, and those that turn the direction of text."""


class AgentLightningError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1
    http_status = 500


class InputError(AgentLightningError):
    """The user's input is wrong."""

    exit_code = 2
    http_status = 422


class ConfigError(InputError):
    """A setting is unknown, would be ignored, has the wrong type or contradicts another."""


class DataError(InputError):
    """A data set or a task row is not what was expected."""


class ModelError(InputError):
    """A model path or name does not load."""


class RewardError(InputError):
    """A reward is no number within its bounds, or final rewards contradict each other."""


class AgentError(AgentLightningError):
    """The agent's own code failed."""


class NoCallsError(AgentError):
    """Agents finish, but no model call of theirs is recorded."""


class InfrastructureError(AgentLightningError):
    """A sandbox, an environment's connection or an external model broke. An agent's code, or what it runs in, raises it: the
    attempt is lost and its rollout is tried again."""


class VerifierError(AgentLightningError):
    """A reward function or an environment's scorer broke: the attempt never counts as a reward of 0."""


class StoreError(AgentLightningError):
    """The store cannot serve."""

    http_status = 503


class NotFoundError(StoreError):
    """No such run, rollout or attempt."""

    exit_code = 2
    http_status = 404


class ConflictError(StoreError):
    """The change contradicts what is recorded."""

    http_status = 409


class RunTakenError(ConflictError):
    """Another process trains the run now: how it ends is no longer this one's to say."""


class EngineError(AgentLightningError):
    """Sampling or learning failed."""

    http_status = 502


class LearnerLostError(EngineError):
    """The learner ended, and what it had learned since the last checkpoint with it."""


class UnjudgeableError(EngineError):
    """A judge refuses what a rollout holds, or its record has no text to judge."""


class BudgetSpentError(AgentLightningError):
    """The budget of a prompt search is spent: it ends with the best candidate so far, which is a result and no failure."""


class GatewayError(AgentLightningError):
    """The gateway cannot start or serve."""


class MissingExtraError(AgentLightningError):
    """An optional dependency is absent."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; install the extra {extra}, in a clone: pip install '.[{extra}]' "
            f"(of a wheel: pip install 'FILE.whl[{extra}]')"
        )


@contextmanager
def boundary(what: str, error: type[AgentLightningError] = AgentError) -> Iterator[None]:
    """Run code that is not ours: whatever escapes becomes `error`, with `what` failed and the cause chained. Ctrl-C and the
    cancellation of a task go on.

    >>> with boundary("reward function"):
    ...     1 / 0
    Traceback (most recent call last):
    agentlightning.errors.AgentError: reward function failed: ZeroDivisionError: division by zero
    """
    try:
        yield
    except (AgentLightningError, KeyboardInterrupt, CancelledError):
        raise
    except BaseException as cause:  # a SystemExit, too, and the panic of a Rust extension, which is no Exception
        raise error(f"{what} failed: {type(cause).__name__}: {cause}") from cause


def printable(text: str) -> str:
    """Escapes what a terminal would obey in text of anybody's.

    >>> printable("a" + chr(27) + "[2J" + chr(13) + chr(10) + "b")
    'a\\x1b[2J\\nb'
    """
    return UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Escapes line ends too: a line of a log, whatever anybody put into it, is one line.

    >>> one_line("a" + chr(10) + "b")
    'a\\nb'
    """
    return printable(text).replace("\n", "\\n")
