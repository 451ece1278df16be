"""Graph files: the state graph of a run's steps so far, kept in its folder, so that a resumed run goes on with it.

`credit_inputs.py` drives it. A file holds the graph after one step, whole or not at all; what is not there is made anew from
the store. As many are kept as there may be steps since the last checkpoint, to which a run may go back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from agentlightning.algorithms.credit.state_graph import StateGraph
from agentlightning.runtime.disk import make_private_folder, open_private


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFiles:
    """The files of one policy's graph."""

    folder: Path
    keep_steps: int
    """Steps that a run may go back."""

    def latest(self, step: int, made_by: str) -> tuple[int, StateGraph]:
        """The latest step up to `step` after which the graph is kept, and the graph; 0 and an empty one where none is.
        `made_by`: settings, under others of which a graph is another."""
        for number, file in sorted(self._files().items(), reverse=True):
            if number > step:
                continue
            try:
                table = orjson.loads(file.read_bytes())
            except orjson.JSONDecodeError:  # cut off by a loss of power
                continue
            if table["made_by"] == made_by:
                edges = {
                    state: {to: (edge[0], edge[1]) for to, edge in out.items()} for state, out in table["edges"].items()
                }
                return number, StateGraph(edges)
        return 0, StateGraph()

    def keep(self, step: int, made_by: str, graph: StateGraph) -> None:
        """Writes the graph after `step`, and deletes those that no run goes back to."""
        make_private_folder(self.folder)
        file = self.folder / f"{step:06d}.json"
        temporary = self.folder / f".{file.name}.tmp"
        with open_private(temporary, "wb") as opened:
            opened.write(orjson.dumps({"made_by": made_by, "edges": graph.edges}))
        temporary.replace(file)
        for number, old in self._files().items():
            if number < step - self.keep_steps:
                old.unlink(missing_ok=True)

    def _files(self) -> dict[int, Path]:
        return {int(file.stem): file for file in self.folder.glob("[0-9]*.json")}
