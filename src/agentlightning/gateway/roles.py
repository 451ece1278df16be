"""Roles: who may call which method of the store, and in which run; decided here, for every request to /api.

Driven by the RPC and the views of the REST API, after a request was decoded and before it is executed. A method that the
table does not name is for admins only. A token of one run has arguments that name no run narrowed to its own; what it names
by rollout is looked up once, since a rollout never changes its run. Knows no HTTP and no secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cachetools import LRUCache

from agentlightning.errors import ConfigError
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.store.audit import Actor
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.summaries import SummaryQuery
from agentlightning.store.tokens import TokenRole

MAX_CACHED_ROLLOUTS = 65_536
"""Rollouts whose runs are remembered."""

Arguments = dict[str, Any]


class RoleError(ConfigError):
    """The caller is known, and may not."""

    http_status = 403


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller of the API."""

    role: TokenRole
    run_id: str | None = None
    """None: every run; a trainer has none before it created it."""
    actor: Actor
    """The caller, as the audit log names it."""
    token_id: str = ""
    """'' for the server key, and for callers of a server without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Things that a request names."""

    runs: Iterable[str | None] = ()
    rollouts: Iterable[str] = ()
    tokens: Iterable[str] = ()
    models: Iterable[tuple[str, int]] = ()
    """Name and number of model versions."""


@dataclass(frozen=True, slots=True)
class MethodRule:
    """The roles beside admin that may call a method, and what a request to it names."""

    roles: frozenset[TokenRole]
    touched: Callable[[Arguments], Touched]
    default: str = ""
    """The argument that is narrowed to the token's run where it is None."""
    refused: Callable[[Arguments], str | None] = lambda _: None
    """The reason why nobody but an admin may send this request."""


def _rule(roles: str, touched: Callable[[Arguments], Touched], default: str = "") -> MethodRule:
    return MethodRule(frozenset(roles.split()), touched, default)  # type: ignore[arg-type]


def _run(given: Arguments) -> Touched:
    return Touched(runs=[given["run_id"]])


def _all_runs(_: Arguments) -> Touched:
    return Touched(runs=[None])


def _rollouts(given: Arguments) -> Touched:
    return Touched(rollouts=given["rollout_ids"])


def _model(given: Arguments) -> Touched:
    version = given["version"]
    changed = [(version.name, version.number)] if version.revision else []
    return Touched(runs=[version.run_id], models=changed)


def _each(name: str, rollouts: bool = False) -> Callable[[Arguments], Touched]:
    """Records, each of which names its run, and perhaps its rollout."""

    def touched(given: Arguments) -> Touched:
        records = given[name]
        return Touched(
            runs={each.run_id for each in records}, rollouts={each.rollout_id for each in records} if rollouts else ()
        )

    return touched


def _finished(given: Arguments) -> Touched:
    finishes = given["finishes"]
    rewards = [reward for finish in finishes for reward in finish.rewards]
    return Touched(
        runs={reward.run_id for reward in rewards},
        rollouts={finish.lease.rollout_id for finish in finishes} | {reward.rollout_id for reward in rewards},
    )


def _created_token(given: Arguments) -> str | None:
    return None if given["role"] == "worker" else "role: a trainer makes tokens for workers of its run only"


_ALL_READ = "trainer worker reader"
_READ = "trainer reader"

RULES: Mapping[str, MethodRule] = {
    "create_run": _rule("trainer", _run, "run_id"),
    "update_run": _rule("trainer", _run),
    "runs": _rule(_ALL_READ, lambda given: Touched(runs=given["ids"]), "ids"),
    "enqueue": _rule("trainer", _each("rollouts")),
    "claim": _rule("trainer worker", lambda given: Touched(runs=[given["worker"].run_id])),
    "heartbeat": _rule(
        "trainer worker",
        lambda given: Touched(runs=[given["worker"].run_id], rollouts={lease.rollout_id for lease in given["leases"]}),
    ),
    "finish": _rule("trainer worker", _finished),
    "cancel": _rule("trainer", _rollouts),
    "rollouts": _rule(_ALL_READ, lambda given: Touched(runs=[given["query"].run_id]), "query"),
    "summaries": _rule(_ALL_READ, lambda given: Touched(runs=[given["query"].run_id]), "query"),
    "count": _rule(_READ, _run),
    "attempts": _rule(_ALL_READ, _rollouts),
    "wait": _rule(_READ, _run),
    "workers": _rule(_READ, _run, "run_id"),
    "append_calls": _rule(
        "trainer", _each("calls", rollouts=True)
    ),  # a worker that could would forge what is trained on
    "put_files": _rule(
        "trainer",
        lambda given: Touched(
            runs=[given["run_id"]], rollouts=[] if given["rollout_id"] is None else [given["rollout_id"]]
        ),
    ),
    "files": _rule(_ALL_READ, _run),
    "append_spans": _rule("trainer worker", _each("spans", rollouts=True)),
    "calls": _rule(_ALL_READ, _rollouts),
    "spans": _rule(_ALL_READ, _rollouts),
    "record_rewards": _rule("trainer worker", _each("rewards", rollouts=True)),
    "record_feedback": _rule("trainer", _each("rewards", rollouts=True)),
    "rewards": _rule(_ALL_READ, _rollouts),
    "put_resources": _rule("trainer", _each("resources")),
    "resources": _rule(_ALL_READ, _run),
    "log_metrics": _rule("trainer", _each("metrics")),
    "metrics": _rule(_READ, _run),
    "series": _rule(_READ, _run),
    "wait_resources": _rule(_READ, _run),
    "follow_metrics": _rule(_READ, _run),
    "statistics": _rule(_READ, _run, "run_id"),
    "sizes": _rule(_READ, lambda given: Touched(runs=given["run_ids"]), "run_ids"),
    "open_step": _rule("trainer", _run),
    "close_step": _rule("trainer", _run),
    "steps": _rule(_READ, _run),
    "reopen_steps": _rule("trainer", _run),
    "put_checkpoint": _rule("trainer", lambda given: Touched(runs=[given["checkpoint"].run_id])),
    "checkpoints": _rule(_READ, _run),
    "record_credit": _rule("trainer", _each("credits", rollouts=True)),
    "credit": _rule(_READ, _rollouts),
    "drop_credit": _rule("trainer", _run),
    "create_token": replace(_rule("trainer", _run), refused=_created_token),
    "tokens": _rule(_READ, _run, "run_id"),
    "revoke_token": _rule("trainer", lambda given: Touched(tokens=[given["token_id"]])),
    "audit": _rule(_READ, _run, "run_id"),
    "put_model": _rule("trainer", _model),
    "models": _rule(_READ, _run, "run_id"),
    "aliases": _rule("reader", _all_runs),
    "wait_aliases": _rule("reader", _all_runs),
}
"""By method of the store. Left to admins: drop_records, delete_runs, expire_leases, mark_delivered, open_session,
find_token, put_alias, signing_secret. Clients may call none: they ask the served model (sessions/)."""


class Permissions:
    """Decides what callers may do in an open store."""

    def __init__(
        self, store: LightningStore, external_keys: ExternalKeys = ExternalKeys(), limit: int = MAX_CACHED_ROLLOUTS
    ) -> None:
        self._store = store
        self._external_keys = external_keys
        self._runs: LRUCache[str, str] = LRUCache(limit)
        """The run of a rollout."""

    def learn(self, runs: Mapping[str, str]) -> None:
        """Remember the runs of rollouts."""
        self._runs.update(runs)

    async def check(self, caller: Caller, method: str, given: Arguments) -> Arguments:
        """The arguments with which the method is to be executed for this caller. RoleError where it may not."""
        if method == "put_resources":  # what the operator of the server forbids is nobody's to store
            for resource in given["resources"]:
                if (why := self._external_keys.refusal_of(resource)) is not None:
                    raise RoleError(why)
        if caller.role == "admin":
            return given
        rule = RULES.get(method)
        if rule is None or caller.role not in rule.roles:
            roles = " or ".join(sorted({"admin"} | (set() if rule is None else rule.roles)))
            raise RoleError(f"{method}: needs a token of role {roles}; this one's role is {caller.role}")
        if caller.run_id is None:
            if caller.role == "trainer" and method == "runs":
                return {**given, "ids": []}  # whoever asks whether its run is there already is told that it is not
            if caller.role == "trainer" and method != "create_run":
                raise RoleError(f"{method}: this trainer's token has no run yet; it gets the first that it creates")
            return given
        given = _narrowed(given, rule.default, caller.run_id)
        await self._check_run(caller, caller.run_id, method, rule, given)
        return given

    async def _check_run(self, caller: Caller, run_id: str, method: str, rule: MethodRule, given: Arguments) -> None:
        touched = rule.touched(given)
        others = {"all runs" if each is None else f"run {each}" for each in touched.runs if each != run_id}
        ids = set(touched.rollouts)
        runs = {each: self._runs[each] for each in ids if each in self._runs}
        if unknown := ids - runs.keys():
            # A rollout that does not exist is left to the method, which says so. What is remembered decides nothing here:
            # other requests, and this one, push rollouts out of the cache.
            found = {each.id: each.run_id for each in await self._store.rollouts(RolloutQuery(ids=sorted(unknown)))}
            self.learn(found)
            runs |= found
        others |= {f"rollout {each}" for each, its_run in runs.items() if its_run != run_id}
        named = set(touched.tokens)
        tokens = {each.id: each.role for each in await self._store.tokens(run_id)} if named else {}
        others |= {f"token {each}" for each in named - tokens.keys()}
        for name, number in touched.models:
            if number not in {each.number for each in await self._store.models(name, run_id)}:
                others.add(f"model version {name}@{number}")
        if others:
            raise RoleError(f"{method}: {min(others)}: this token opens run {run_id} only")
        if kept := [each for each in named if tokens[each] != "worker"]:
            raise RoleError(f"{method}: token {min(kept)}: a trainer revokes tokens of workers only")
        if (why := rule.refused(given)) is not None:
            raise RoleError(f"{method}: {why}")


def _narrowed(given: Arguments, default: str, run_id: str) -> Arguments:
    """The arguments with the run where they name none."""
    if not default:
        return given
    value = given[default]
    if isinstance(value, RolloutQuery | SummaryQuery):
        return {**given, default: replace(value, run_id=run_id)} if value.run_id is None else given
    if value is not None:
        return given
    return {**given, default: run_id if default == "run_id" else [run_id]}
