"""The notebook of the examples runs from its first cell to its last, on a run that was made for it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "explore_a_run.ipynb"


def test_the_notebook_runs_and_shows_a_rollout(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE", store_url)
    monkeypatch.setenv("AGL_RUN", "tour")
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("Bergen" in output.get("data", {}).get("text/html", "") for output in shown)
    assert any("train/reward_mean" in output.get("data", {}).get("text/html", "") for output in shown)
