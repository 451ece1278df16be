"""Tree rollouts: forks that a group's trees are made of, for rollouts = "tree".

The scheduler drives it: whenever all rollouts of a tree have finished, and rounds are left, the tree is forked. The forks
are rollouts of the group like any others, named by their place in it, so that a trainer that was killed finds its own.
Their agents are brought back by the gateway (store/forks.py), and go on with the weights of the same step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentlightning.algorithms.rollout_tree import RolloutTree
from agentlightning.engines.base import Metrics
from agentlightning.records import FINAL_STATES, Call, NewRollout, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.forks import forks_of, replay_ended, replayable
from agentlightning.store.scan import by_attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSampler:
    """Forks the trees of one run's groups."""

    store: LightningStore
    tree: RolloutTree
    group_size: int
    seed: int

    async def next_round(self, group: Sequence[Rollout], independent: Sequence[NewRollout]) -> list[NewRollout]:
        """The rollouts that the trees of a group get next, none where they still run or are complete.

        group: what was enqueued of it. independent: the whole group as it would be without trees, by replica. A tree is
        forked after calls that were sampled for one of its rollouts that succeeded and that others followed, chosen at
        random, each once before any a second time (Tree-GRPO, arXiv 2509.21240, section 3.1, has nodes chosen at random).
        Where it has none, as of an agent that makes one call, its place is taken by an independent rollout.
        """
        known = {one.replica: one for one in group}
        growing: dict[int, list[int]] = {}
        """By tree, the replicas of its next round."""
        for tree in range(self.tree.roots):
            replicas = self.tree.replicas(tree, self.group_size)
            wanted = [replica for replica in replicas if replica not in known]
            if wanted and all(known[one].state in FINAL_STATES for one in replicas if one in known):
                growing[tree] = wanted[: self.tree.branches(self.group_size)]
        ids = [known[each].id for tree in growing for each in self._sampled(tree, known)]
        calls = by_attempt(await self.store.calls(ids)) if ids else {}
        return [
            new
            for tree, wanted in growing.items()
            for new in self._forks([known[each] for each in self._sampled(tree, known)], wanted, calls, independent)
        ]

    def _sampled(self, tree: int, known: Mapping[int, Rollout]) -> list[int]:
        return [replica for replica in self.tree.replicas(tree, self.group_size) if replica in known]

    def _forks(
        self,
        tree: Sequence[Rollout],
        wanted: Sequence[int],
        calls: Mapping[tuple[str, int], Sequence[Call]],
        independent: Sequence[NewRollout],
    ) -> list[NewRollout]:
        """One for each of the `wanted` replicas."""
        nodes = [
            (rollout, place)
            for rollout in tree
            if rollout.state == "succeeded"
            for place in _nodes(calls.get((rollout.id, rollout.attempt), ()))
        ]
        # By names alone: a run with the same seed forks alike, and so does a step that was killed before it forked.
        random.Random(f"{self.seed}:{independent[0].group_id}:{wanted[0]}").shuffle(nodes)
        found = []
        for number, replica in enumerate(wanted):
            new = independent[replica]
            if nodes:
                rollout, place = nodes[number % len(nodes)]
                [fork] = forks_of(rollout, place, 1)
                new = replace(new, fork=fork.fork, prompts=fork.prompts)
            found.append(new)
        return found


def _nodes(calls: Sequence[Call]) -> list[int]:
    """The numbers of calls to replay, so that the last of them is a call that was sampled for the rollout itself, and is
    not its last one."""
    choices = replayable(calls)
    return [place for place, one in enumerate(choices[:-1], 1) if one[0].replayed_id is None]


@dataclass(slots=True)
class TreeTally:
    """Counts over the rollouts of one step, of what they share."""

    _forks: int = 0
    _ended: int = 0
    _sampled: int = 0
    _replayed: int = 0
    _tokens: int = 0

    def add(self, rollouts: Sequence[Rollout], calls: Sequence[Call]) -> None:
        """Rollouts that have finished, with the calls of their last attempts."""
        own = by_attempt(calls)
        for rollout in rollouts:
            recorded = own[rollout.id, rollout.attempt]
            self._forks += rollout.fork is not None
            self._ended += replay_ended(rollout, recorded) is not None
            shared = [call for call in recorded if call.shared]
            self._replayed += len(shared)
            self._tokens += sum(len(call.sampled_ids) for call in shared)
            self._sampled += sum(call.learnable for call in recorded if call.policy)

    def metrics(self) -> Metrics:
        """By the names of metrics.py."""
        return {
            "tree/forks": float(self._forks),
            "tree/replay_ended_share": self._ended / max(1, self._forks),
            "tree/shared_share": self._replayed / max(1, self._replayed + self._sampled),
            "tree/replayed_tokens": float(self._tokens),
        }
