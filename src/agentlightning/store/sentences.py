"""Sentences with which stores refuse a change, and with which they explain why an attempt or a rollout ended as it did.

Each stands here once, under a code.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.errors import ConflictError, NotFoundError, StoreError

_STEP = "step {0} of run {1}"

_REFUSALS: dict[str, tuple[type[StoreError], str]] = {
    "no_run": (NotFoundError, "no such run: {0}"),
    "run_exists": (ConflictError, "run {0} exists already"),
    "no_token": (NotFoundError, "no such token: {0}"),
    "token_has_run": (ConflictError, "token {0} has its run already, or was revoked; it creates no other"),
    "no_template": (NotFoundError, "prompts: run {0} has no prompt template {1!r} of version {2}"),
    "no_file_user": (NotFoundError, "files: there is no rollout {0} in run {1}"),
    "no_session": (NotFoundError, "rewards: rollout {0} is no session of run {1}"),
    "no_attempt": (NotFoundError, "{0}: rollout {1} has no attempt {2}"),
    "no_call": (
        NotFoundError,
        "{0}: they name a call that is not recorded in their rollout (a parent comes before its children)",
    ),
    "resource_changed": (ConflictError, "resources: the newest version of {0} of run {1} is {2}, not {3}"),
    "negative_step": (ConflictError, f"{_STEP}: a checkpoint's step is 0 or more"),
    "no_step": (NotFoundError, f"no such step: {_STEP}"),
    "step_open": (ConflictError, f"{_STEP} is open with another list of rollouts already"),
    "step_closed": (ConflictError, f"{_STEP} is closed already"),
    "step_closed_otherwise": (ConflictError, f"{_STEP} was closed with version {{2}}, not {{3}}"),
    "listed_twice": (ConflictError, f"{_STEP}: a rollout is listed twice"),
    "no_rollout": (NotFoundError, f"{_STEP}: no such rollout: {{2}}"),
    "of_other_run": (ConflictError, f"{_STEP}: rollout {{2}} belongs to run {{3}}"),
    "is_evaluation": (
        ConflictError,
        f"{_STEP}: rollout {{2}} is an evaluation rollout, which is never learned from",
    ),
    "not_finished": (ConflictError, f"{_STEP}: rollout {{2}} is {{3}}, not finished"),
    "consumed": (ConflictError, f"{_STEP}: rollout {{2}} was consumed by step {{3}} already"),
    "no_credited_rollout": (NotFoundError, "credit: there is no rollout {0} in run {1}"),
    "no_model": (NotFoundError, "no such model version: {0}"),
    "model_changed": (ConflictError, "{0}: was changed meanwhile; look at it again"),
    "no_alias": (NotFoundError, "no such alias: {0}"),
    "model_deleted": (ConflictError, "{0}: its weights were deleted"),
    "model_in_use": (ConflictError, "{0}: its weights are kept, since it is {1}"),
    "run_has_models": (ConflictError, "run {0} is kept with the model versions that are in use: {1}"),
    "has_records_to_come": (ConflictError, "rollout {0} is {1}: only records of finished rollouts can be dropped"),
}

REASONS = {
    "cancelled": "the rollout was cancelled",
    "silent_worker": "worker {0} stopped sending heartbeats",
    "restarted_worker": "worker {0} ended and started again",
    "unknown_call": "{0}: expected call_id to name a recorded call of the rollout, got {1}",
    "two_rewards": "final rewards from two sources ({0}) contradict each other: give the reward in one way only",
    "broken_spans": "broken spans, dropped or cut: {0}",
    "refused_calls": "{0} refused: {1}",
    "pinned": "pinned",
    "aliased": "named by the alias {0}",
    "aliased_before": "what the alias {0} is rolled back to",
    "unknown_route": "{0}: the agent asked for {1}, which is no route; its base URL must end as it was given",
}


def refusal(code: str, *arguments: object) -> StoreError:
    kind, sentence = _REFUSALS[code]
    return kind(sentence.format(*arguments))


def reason(code: str, *arguments: object) -> str:
    return REASONS[code].format(*arguments)


def in_use(pinned: bool, aliases: Sequence[tuple[str, bool]]) -> str:
    """Says by what the weights of a model version are in use; nothing where they are not.

    aliases: each with True where it names the version now, False where it did before.
    """
    uses = [reason("pinned")] if pinned else []
    uses += [reason("aliased" if now else "aliased_before", alias) for alias, now in aliases]
    return ", ".join(uses)
