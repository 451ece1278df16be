"""SessionStore: the methods for sessions, the rollouts of users who talk to a served model.

Part of `LightningStore`, for gateways. A session is a rollout of a group of its own, claimed as it is made: no
worker runs its agent, which is a program elsewhere. Knows no keys of users and no model versions.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from agentlightning.records import Claim, NewRollout, Reward

HOLDER = "gateway"
"""Holds the leases of sessions, in the place of a worker."""


class SessionStore(abc.ABC):
    """The methods. Each may raise StoreError when the store cannot serve."""

    @abc.abstractmethod
    async def open_session(self, session: NewRollout, lease_s: float) -> Claim:
        """Open a session, or go on with the one that is open: the running rollout of the group, whose lease then ends
        `lease_s` seconds from now.

        Where there is none a new rollout begins, with the group's next replica (the one given counts for nothing), claimed
        for attempt 1 in the same transaction: of callers at the same time, through any server, all get the same. Prompt
        templates are pinned as by `claim`. It ends by `finish`, or has succeeded when its lease runs out.
        """

    @abc.abstractmethod
    async def record_feedback(self, rewards: Sequence[Reward]) -> None:
        """Record rewards of sessions, at any time; ids that exist are ignored.

        Where a session has succeeded already its reward, also in its summary, becomes `final_reward` of what is recorded
        then. NotFoundError where there is no such session or call; RewardError where a value is not finite.
        """
