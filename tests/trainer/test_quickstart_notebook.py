"""The notebook that trains runs from its first cell to its last, with a tiny model and one step."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from agentlightning.demo import tiny_model

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_quickstart_notebook_trains_and_shows_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_STORE", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in notebook.cells)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    tiny_model.build(tmp_path / "model", ["What is the capital of France?", "Paris"], hidden=32, layers=1, context=128)
    parameters.source = f"MODEL, STEPS, TASKS_PER_STEP = {str(tmp_path / 'model')!r}, 1, 2"

    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in data for data in shown)
    assert any("capital of" in data.get("text/plain", "") for data in shown)
    assert any("'greedy'" in data.get("text/plain", "") for data in shown)
    assert (tmp_path / "trained-model" / "config.json").is_file()
