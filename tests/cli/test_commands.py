"""The commands, up to where processes would start: what they print when piped, and what they refuse."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer

import build
from agentlightning.cli.app import app
from agentlightning.cli.demo import engine_table
from agentlightning.cli.train import agent_setting
from agentlightning.config.run import LIMITS_RESOURCE
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.gateway.attempts import gateway_span
from agentlightning.records import Checkpoint, Finish, Metric, NewRollout, Resource, Reward, Span, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import REFUSED_CALLS
from agentlightning.store.open import open_store
from agentlightning.trainer.run_lease import resume_line
from build import agl

OWN = Path(__file__).parents[2] / "examples" / "own_algorithm" / "own_algorithm.py"
CONFIG = """
[model]
path = "./nowhere"
[agent]
run = "agent.py:solve"
[data]
train = "tasks.jsonl"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    (tmp_path / "train.toml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1"}\n')
    return tmp_path


def filled(work: Callable[[LightningStore], Awaitable[None]]) -> str:
    """A store with the run `run` in which `work` was done; its URL."""

    async def fill() -> None:
        async with open_store("sqlite:///agl.db") as store:
            await store.create_run(
                "a name that is much longer than " + "any column of eighty characters " * 2, {}, "run"
            )
            await work(store)

    asyncio.run(fill())
    return "sqlite:///agl.db"


async def nothing(store: LightningStore) -> None: ...


async def a_program_that_failed(store: LightningStore) -> None:
    await store.enqueue([NewRollout(run_id="run", task={"q": "[/b]"}, group_id="g")])
    worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
    [claim] = await store.claim(worker)
    await store.finish(
        [Finish(lease=claim.lease, state="failed", error="KeyError: '[/b]'", output="it [printed] this")]
    )


def test_a_run_gets_tags_that_lists_show_and_words_alone_are_tags() -> None:
    store = filled(nothing)
    assert agl("runs", "tag", "run", "baseline", "lr-sweep", "--store", store).stdout == "run: baseline lr-sweep\n"
    listed = agl("runs", "list", "--store", store).stdout
    assert "baseline lr-sweep" in listed
    assert "any column of eighty characters any column of eighty characters" in listed  # piped, nothing is cut
    refused = agl("runs", "tag", "run", "two words", "--store", store).exception
    assert "tags.0: expected words of at most 64 characters" in str(refused)
    assert agl("runs", "tag", "run", "--store", store).stdout == "run: no tag\n"
    assert "baseline" not in agl("runs", "list", "--store", store).stdout
    assert isinstance(agl("runs", "tag", "other", "x", "--store", store).exception, NotFoundError)


def test_a_rollout_is_shown_with_what_its_program_printed_and_brackets_as_they_are() -> None:
    store = filled(a_program_that_failed)
    listed = agl("rollouts", "list", "run", "--store", store)
    assert (listed.exit_code, "KeyError: '[/b]'" in listed.stdout) == (0, True)
    rollout = listed.stdout.splitlines()[1].split()[0]
    shown = agl("rollouts", "show", rollout, "--store", store)
    assert shown.exit_code == 0
    for text in ('task {"q":"[/b]"}', "attempt 1  failed  w", "error: KeyError: '[/b]'", "output: it [printed] this"):
        assert text in shown.stdout


async def a_failure_and_a_refusal(store: LightningStore) -> None:
    await store.enqueue([NewRollout(run_id="run", task={}, group_id=name) for name in ("failed", "refused")])
    worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
    claims = await store.claim(worker, limit=2)
    [refused] = [claim for claim in claims if claim.rollout.group_id == "refused"]
    await store.append_spans([gateway_span(refused.rollout, 1, REFUSED_CALLS, {"fields": "top_a", "count": 1})])
    await store.finish([Finish(lease=claim.lease, state="failed", error="400") for claim in claims])


def test_refused_rollouts_are_listed_alone() -> None:
    listed = agl("rollouts", "list", "run", "--state", "refused", "--store", filled(a_failure_and_a_refusal))
    assert listed.exit_code == 0
    assert ("refused/0" in listed.stdout, "failed/0" in listed.stdout) == (True, False)
    assert "1 call refused: top_a 1" in listed.stdout


async def five_rollouts(store: LightningStore) -> None:
    await store.enqueue([NewRollout(run_id="run", task={}, group_id="g", replica=n, step=n) for n in range(5)])
    worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
    for claim in await store.claim(worker, limit=5):
        place = {"run_id": "run", "rollout_id": claim.rollout.id, "attempt": 1}
        reward = Reward(id=claim.rollout.id, value=claim.rollout.replica / 10, source="return", **place)
        await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=(reward,))])


def test_finished_rollouts_are_filtered_sorted_and_paged() -> None:
    store = filled(five_rollouts)
    where = ("rollouts", "list", "run", "--where", "reward < 0.4 or step = 4", "--sort", "reward", "--store", store)
    pages = [agl(*where, "--json", "--limit", "3")]
    pages.append(agl(*where, "--json", "--after", orjson.loads(pages[0].stdout)["next"]))
    found = [[row["replica"] for row in orjson.loads(page.stdout)["rollouts"]] for page in pages]
    assert found == [[4, 3, 2], [1, 0]]
    assert orjson.loads(pages[1].stdout)["next"] is None
    listed = agl(
        "rollouts", "list", "run", "--where", "reward < 0.4", "--step", "2", "--mode", "train", "--store", store
    )
    assert [line.split()[3] for line in listed.stdout.splitlines()[1:]] == ["g/2"]
    assert "more of them: --after " in agl(*where, "--limit", "1").stdout
    assert "where: expected a field" in str(agl(*where[:4], "rewrad < 1", "--store", store).exception)


async def a_program_with_spans(store: LightningStore) -> None:
    await store.enqueue([NewRollout(run_id="run", task={}, group_id="g")])
    [claim] = await store.claim(WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0))
    at = f"{claim.rollout.id}.1."

    def a_span(number: int, name: str, parent: int, **fields: Any) -> Span:
        times = {"started_ns": number * 10**9, "finished_ns": 9 * 10**9}
        place = {"run_id": "run", "rollout_id": claim.rollout.id, "attempt": 1, "parent_id": f"{at}{parent:016x}"}
        return Span(id=f"{at}{number:016x}", name=name, **{**place, **times, **fields})

    failed = a_span(3, "tool [x]", 2, status="error", status_message="no such table")
    await store.append_spans([a_span(1, "round", 2), a_span(2, "and round", 1), failed, a_span(4, "lost", 77)])
    await store.finish([Finish(lease=claim.lease, state="succeeded")])


def test_what_an_agent_did_outside_its_calls_is_shown_as_a_tree() -> None:
    store = filled(a_program_with_spans)
    rollout = agl("rollouts", "list", "run", "--store", store).stdout.splitlines()[1].split()[0]
    shown = agl("rollouts", "show", rollout, "--spans", "--store", store)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[-5:] == [
        "    0.000 s     8.000 s  round",
        "    1.000 s     7.000 s    and round",
        "    2.000 s     6.000 s      tool [x]",
        "                            no such table",
        "    3.000 s     5.000 s  lost",
    ]
    assert "round" not in agl("rollouts", "show", rollout, "--store", store).stdout


@pytest.mark.parametrize("arguments", [["runs", "list"], ["runs", "show", "run"], ["rollouts", "list", "run"]])
def test_a_command_that_reads_makes_no_store(arguments: list[str], folder: Path) -> None:
    assert "agl.db: there is no store yet" in str(agl(*arguments).exception)
    assert not (folder / "runs").exists()


async def a_run_with_numbers(store: LightningStore) -> None:
    numbers = {"train/loss": 0.5, "policies/white/policy/entropy": 0.25, "train/reward_mean": 1.0, "zebra": 2.0}
    await store.log_metrics([Metric(run_id="run", step=3, name=name, value=value) for name, value in numbers.items()])
    await store.log_metrics([Metric(run_id="run", step=step, name="cost/agent_s", value=800.0) for step in range(1, 4)])
    await store.update_run("run", summary={"alarms": {"no_signal": "nothing could be learned"}})


def test_a_run_is_shown_with_its_last_numbers_by_group_and_what_they_warn_of() -> None:
    shown = agl("runs", "show", "run", "--store", filled(a_run_with_numbers)).stdout.splitlines()
    at = shown.index("train:")
    assert shown[at:] == [
        "train:",
        "  train/reward_mean: 1 (step 3)",
        "  train/loss: 0.5 (step 3)",
        "policy:",
        "  policies/white/policy/entropy: 0.25 (step 3)",
        "cost:",
        "  cost/agent_s: 800 (step 3)",
        "other:",
        "  zebra: 2 (step 3)",
        "cost of its training steps: agent seconds 2,400",
        "warning no_signal: nothing could be learned",
    ]


LISTS = [
    ("runs", "list"),
    ("runs", "list", "--queue"),
    ("runs", "show", "run"),
    ("runs", "show", "run", "--drift"),
    ("runs", "show", "run", "--tasks"),
    ("rollouts", "list", "run"),
    ("models", "list"),
    ("prompts", "list", "run"),
    ("prompts", "list", "run", "--candidates"),
    ("tokens", "list"),
    ("env", "list"),
    ("train", "--list-algorithms"),
]


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_every_list_is_json_with_json(words: tuple[str, ...]) -> None:
    url = filled(a_run_with_numbers)
    store = [] if words[0] in ("env", "train") else ["--store", url]

    listed = agl(*words, "--json", *store)

    assert listed.exit_code == 0, listed.output
    assert isinstance(orjson.loads(listed.stdout), list | dict)


@pytest.mark.parametrize(
    ("words", "kind", "sentence"),
    [
        (
            "train train.toml --store memory:// --server http://127.0.0.1:1",
            ConfigError,
            "give --store or --server, not both",
        ),
        ("train --algorithm dpo --model m", ConfigError, "--algorithm dpo: give --from-run RUN"),
        ("train --resume run train.toml", ConfigError, "give no other settings"),
        ("train --resume run --agent a.py:f", ConfigError, "give no other settings"),
        ("eval run --set trainer.steps=3", ConfigError, "give no other settings"),
        (
            "worker agent.py:solve --server nowhere --run r",
            ConfigError,
            "--server: expected http://HOST:PORT or https://…",
        ),
        ("demo --set engine.nmae=verl", ConfigError, "nmae"),
        ("demo --set trainer.steps=3", ConfigError, "--set trainer.steps: expected a setting of [engine]"),
        ("demo --set engine.learner.processes=2", ConfigError, "processes"),
        ("rollouts list other --store sqlite:///agl.db", NotFoundError, "other: no such run"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(folder: Path, words: str, kind: type[Exception], sentence: str) -> None:
    filled(nothing)
    refused = agl(*words.split()).exception
    assert isinstance(refused, kind)
    assert sentence in str(refused)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("command", [["train", "--resume", "run"], ["eval", "run"]])
def test_a_run_may_have_the_addresses_of_the_host_on_which_it_goes_on(command: list[str]) -> None:
    refused = agl(*command, "--set", "engine.listen=10.0.0.9:9000").exception
    assert isinstance(refused, NotFoundError)  # there is no such run; its settings are no matter


@pytest.mark.parametrize(
    ("agent", "setting"),
    [
        ("agent.py:solve", "agent.run"),
        ("agent.py", "agent.run"),
        ("my agents/agent.py:solve", "agent.run"),
        ("package.module:solve", "agent.run"),
        ("runs/x/solve-1a2b.pkl", "agent.run"),
        ("node agent.js", "agent.command"),
        ("python agent.py", "agent.command"),
        ("./agent --port 80:http", "agent.command"),
    ],
)
def test_functions_and_commands_are_told_apart(folder: Path, agent: str, setting: str) -> None:
    (folder / "my agents").mkdir()
    (folder / "my agents" / "agent.py").write_text("")
    assert agent_setting(agent) == setting


def test_the_line_that_resumes_can_be_pasted() -> None:
    assert resume_line(Path("runs/20261120-1")) == "agl train --resume 20261120-1"
    assert resume_line(Path("my runs/20261120-1")) == "agl train --resume 20261120-1 --runs 'my runs'"


def test_of_several_policies_one_is_exported_by_its_name(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / "step-000001"
    for policy in ("black", "white"):
        (checkpoint / policy).mkdir(parents=True)
        for name in ("config.json", "learner.pt"):
            (checkpoint / policy / name).write_text(policy)

    async def saved(store: LightningStore) -> None:
        await store.put_checkpoint(Checkpoint(run_id="run", step=1, path=str(checkpoint), version=2))

    where = ("--store", filled(saved))
    for given in ((), ("--policy", "red")):
        refusal = agl("models", "export", "run", "--to", "model", *given, *where).exception
        assert isinstance(refusal, ConfigError)
        assert str(refusal).endswith("expected black, white")
    assert agl("models", "export", "run", "--to", "model", "--policy", "white", *where).exit_code == 0
    assert [(file.name, file.read_text()) for file in (folder / "model").iterdir()] == [("config.json", "white")]


def test_settings_of_the_demo_make_the_table_of_its_engine() -> None:
    given = ["engine.name=verl", "engine.options.trainer.nnodes=2", 'engine.options.python="python"']
    table = {"name": "verl", "options": {"trainer": {"nnodes": 2}, "python": "python"}}
    assert engine_table(given) == {"device": "auto", "dtype": "float32", **table}


def test_help_has_four_sections_and_descriptions_fit_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = agl("--help").stdout
    assert [line for line in shown.splitlines() if line in ("Start:", "Look:", "Use:", "Operate:")] == [
        "Start:",
        "Look:",
        "Use:",
        "Operate:",
    ]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in [(), *((name,) for name, one in commands.items() if hasattr(one, "commands"))]:
        listed = agl(*words, "--help").stdout
        assert "..." not in listed.partition("Start:" if not words else "Commands:")[2], words
        assert max(map(len, listed.splitlines())) <= 80


def test_there_are_at_most_45_commands_and_completion_is_on() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    leaves = [name for one in commands.values() for name in getattr(one, "commands", {"": one})]
    assert len(leaves) <= 45
    assert "--install-completion" in agl("--help").stdout


def test_check_and_eval_take_the_options_of_train() -> None:
    shared = (
        "--env",
        "--agent",
        "--tasks",
        "--val",
        "--reward",
        "--model",
        "--chat-template",
        "--set",
        "--store",
        "--runs",
    )
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name in ("train", "check", "eval"):
        assert {*shared} <= {option for one in commands[name].params for option in one.opts}, name


def test_every_part_of_an_algorithm_is_listed_with_its_source_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    Path("train.toml").write_text(f'{CONFIG}[algorithm]\nloss = "{OWN}:sapo"\n')
    lines = agl("train", "train.toml", "--list-algorithms").stdout.splitlines()
    assert any(line.split()[:2] == ["gspo", "built-in"] and "arXiv 2507.18071" in line for line in lines)
    assert any(line.split()[:2] == ["decisive", "built-in"] and "key = None" in line for line in lines)
    assert any(f"{OWN}:sapo" in line and " file " in line and "negative = 1.05" in line for line in lines)


async def a_key_with_limits(store: LightningStore) -> None:
    await store.create_run("serve support", {"serve": {"model": "support"}}, "served")
    value = {"keys": {"shop": {"max_calls": 1}}}
    await store.put_resources([Resource(run_id="served", name=LIMITS_RESOURCE, kind="limits", value=value)])


def test_a_key_that_has_no_limits_while_others_have_says_so() -> None:
    words = ("tokens", "create", "--role", "client", "--run", "served", "--store", filled(a_key_with_limits), "--name")
    assert "--name: sohp has no limits; names with limits are shop" in agl(*words, "sohp").stderr
    assert "no limits" not in agl(*words, "shop").stderr


async def forks(store: LightningStore) -> None:
    """Each rollout: a first turn, one that continues it, one that forks, one of an external model."""
    await store.enqueue([NewRollout(run_id="run", task={}, group_id=str(number)) for number in range(3)])
    for claim in await store.claim(WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0), limit=3):
        calls = [build.call(claim, f"{claim.rollout.id}-{number}", sampled_ids=[2] * 10) for number in range(4)]
        more = [
            {},
            {"parent_id": calls[0].id},
            {"fork_cause": "history_cut", "untrained_tokens": 15},
            {"policy": ""},
        ]
        await store.append_calls([replace(one, **fields) for one, fields in zip(calls, more, strict=True)])


def test_drift_is_counted_by_how_calls_continue_and_a_fork_is_shown_with_what_it_costs() -> None:
    store = filled(forks)
    shown = agl("runs", "show", "run", "--drift", "--store", store).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "9 calls of the policy, in 3 rollouts"
    assert [line.split()[:2] for line in lines[1:4]] == [["3", "first"], ["3", "continued:"], ["3", "forks:"]]
    assert lines[4:7] == [
        "3 history_cut: the agent left out a part of the history",
        "90 sampled tokens",
        "45 sampled tokens that forks repeat as context only (50.00% of all sampled)",
    ]
    assert lines[7].startswith("3 calls answered by external models")
    assert lines[8] == "exact share: 50.00% of the 6 calls that have a predecessor"
    rollout = agl("rollouts", "list", "run", "--store", store).stdout.splitlines()[1].split()[0]
    of_one = agl("rollouts", "show", rollout, "--store", store).stdout
    assert "fork: history_cut (15 sampled tokens are context only)" in of_one


def test_the_drift_of_a_run_without_calls_says_so() -> None:
    assert (
        "no calls of the policy are recorded"
        in agl("runs", "show", "run", "--drift", "--store", filled(nothing)).stdout
    )


async def a_step_that_waits_for_a_tool(store: LightningStore) -> None:
    seconds = {"time/step_s": 10.0, "time/collect_s": 8.0, "rollout/duration_s": 7.0, "rollout/between_calls_s": 6.0}
    await store.log_metrics([Metric(run_id="run", step=1, name=name, value=value) for name, value in seconds.items()])


def test_a_run_is_shown_with_what_bounds_it() -> None:
    where = ("runs", "show", "run", "--store", filled(a_step_that_waits_for_a_tool))
    shown = agl(*where, "--bottlenecks").stdout
    assert "phases of a step:" in shown
    assert "slow_tools (up to 69%): a rollout takes 7 s, of which 6 s (86%) lie before and between" in shown
    assert orjson.loads(agl(*where, "--bottlenecks", "--json").stdout)["steps"] == 1
    assert "--bottlenecks: conflicts with --tasks" in str(agl(*where, "--bottlenecks", "--tasks").exception)
    assert "--steps: expected --bottlenecks with it" in str(agl(*where, "--steps", "3").exception)
