"""Loading agents and reward functions by path, by module and by value."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.user_code import agent_spec, load


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_finds_its_neighbours_while_it_is_imported_and_when_it_is_called(tmp_path: Path) -> None:
    write(tmp_path, "neighbour_one.py", "A = 1\n")
    write(tmp_path, "neighbour_two.py", "B = 2\n")
    source = "import neighbour_one\ndef solve(task, llm):\n    import neighbour_two\n"
    path = write(tmp_path, "agent.py", source + "    return neighbour_one.A + neighbour_two.B\n")
    assert load(f"{path}:solve")({}, None) == 3


def test_neighbours_called_like_libraries_hide_them_from_nobody(tmp_path: Path) -> None:
    names = ("random", "tokenize", "statistics", "wsgiref", "colorsys", "cloudpickle", "typing_extensions")
    for name in names:
        write(tmp_path, f"{name}.py", "raise ImportError('of the agent')\n")
    write(tmp_path, "neighbour_of_its_own.py", "C = 3\n")
    source = (
        f"import {', '.join(names)}, neighbour_of_its_own\ndef solve(task, llm):\n    return neighbour_of_its_own.C\n"
    )
    path = write(tmp_path, "agent.py", source)
    assert load(f"{path}:solve")({}, None) == 3


def test_a_neighbour_that_a_library_hides_is_named(tmp_path: Path) -> None:
    beside = write(tmp_path, "sched.py", "def plan(): return 1\n")
    path = write(tmp_path, "agent.py", "from sched import plan\ndef solve(task, llm): return plan()\n")
    with pytest.raises(AgentError, match=rf"{re.escape(str(beside))} is hidden by the module 'sched' of .*: rename it"):
        load(f"{path}:solve")


def test_two_files_of_the_same_name_are_two_modules(tmp_path: Path) -> None:
    one = write(tmp_path, "one/agent.py", "def solve(task, llm):\n    return 1\n")
    two = write(tmp_path, "two/agent.py", "def solve(task, llm):\n    return 2\n")
    assert load(f"{one}:solve")({}, None) == 1
    assert agent_spec(load(f"{one}:solve"), tmp_path) == f"{one}:solve"  # it travels by its path
    assert load(f"{two}:solve")({}, None) == 2


def test_a_file_of_a_package_may_use_relative_imports(tmp_path: Path) -> None:
    write(tmp_path, "wholepackage/__init__.py", "")
    write(tmp_path, "wholepackage/tools.py", "N = 7\n")
    path = write(tmp_path, "wholepackage/agent.py", "from .tools import N\ndef solve(task, llm):\n    return N\n")
    assert load(f"{path}:solve")({}, None) == 7


def test_without_a_name_the_function_marked_with_rollout_is_taken(tmp_path: Path) -> None:
    source = "from agentlightning.runner.agent import rollout\ndef other(task, llm): pass\n"
    source += "@rollout\ndef solve(task, llm): return 5\n"
    path = write(tmp_path, "agent.py", source)
    assert load(str(path))({}, None) == 5
    assert load("operator:add", ("a", "b"), "thing")(1, 2) == 3
    unmarked = write(tmp_path, "score.py", "def exact(task, result): pass\n")
    with pytest.raises(ConfigError, match=r"reward function .*: add a name, as in .*score\.py:NAME; there are exact"):
        load(str(unmarked), ("task", "result"), "reward function")


@pytest.mark.parametrize(
    ("source", "name", "error", "sentence"),
    [
        (None, ":solve", ConfigError, "does not exist"),
        ("def other(task, llm): pass\n", ":solve", ConfigError, "there is no 'solve'; there are other"),
        ("def solve(task): pass\n", ":solve", ConfigError, r"expected to be callable as \(task, llm\)"),
        ("solve = 3\n", ":solve", ConfigError, "expected a callable"),
        ("def solve(task, llm): pass\n", "", ConfigError, "no function is marked with @rollout"),
        ("import nothing_like_it\n", ":solve", AgentError, r"ModuleNotFoundError.*nothing_like_it.*agent\.py:1"),
        ("\n\n1 / 0\n", ":solve", AgentError, r"ZeroDivisionError.*agent\.py:3"),
    ],
)
def test_a_bad_agent_file_is_named_in_one_sentence(
    tmp_path: Path, source: str | None, name: str, error: type[Exception], sentence: str
) -> None:
    path = tmp_path / "agent.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(error, match=sentence) as raised:
        load(f"{path}{name}")
    with pytest.raises(ConfigError, match=r"module 'no_such_module' does not exist; expected file\.py:name"):
        load("no_such_module:solve")
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_closure_travels_by_value(tmp_path: Path) -> None:
    weight = 4

    async def solve(task: dict[str, int], llm: object) -> int:
        return weight * task["x"]

    spec = agent_spec(solve, tmp_path / "agents")
    assert spec.endswith(".pkl")
    assert asyncio.run(load(spec)({"x": 2}, None)) == 8


def test_a_function_of_a_script_reaches_another_process(tmp_path: Path) -> None:
    write(tmp_path, "scripts_neighbour.py", "N = 2\n")
    script = write(
        tmp_path,
        "script.py",
        "import sys\nfrom pathlib import Path\nimport scripts_neighbour\n"
        "from agentlightning.runner.user_code import agent_spec\nK = 5\n"
        "def solve(task, llm):\n    return K * scripts_neighbour.N\n"
        "sys.stdout.write(agent_spec(solve, Path(sys.argv[1])))\n",
    )
    made = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True)
    reader = (
        "import sys; from agentlightning.runner.user_code import load; sys.stdout.write(str(load(sys.argv[1])({}, 0)))"
    )
    read = subprocess.run(
        [sys.executable, "-c", reader, made.stdout], capture_output=True, text=True, check=True, cwd="/"
    )
    assert read.stdout == "10"


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")

    def solve(task: dict[str, int], llm: object) -> int:
        return file.write("")

    with file, pytest.raises(ConfigError, match=r"cannot be sent to workers.*put it in a module"):
        agent_spec(solve, tmp_path)
