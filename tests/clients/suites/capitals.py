"""A taskset for verifiers: two questions, rewarded for a completion that repeats them."""

from __future__ import annotations

import verifiers.v1 as vf


class CapitalsData(vf.TaskData):
    country: str


class CapitalsTask(vf.Task[CapitalsData]):
    @vf.reward(weight=1.0)
    async def names_the_country(self, trace: vf.Trace) -> float:
        return float(self.data.country in str(trace.messages[-1]))


class CapitalsTaskset(vf.Taskset[CapitalsTask, vf.TasksetConfig]):
    def load(self) -> list[CapitalsTask]:
        asked = [CapitalsData(prompt=f"The capital of {each}?", country=each) for each in ("Norway", "Peru")]
        return [CapitalsTask(data, self.config.task) for data in asked]


__all__ = ["CapitalsTaskset"]
