"""``agl train``, ``agl check`` and ``agl eval``: one rollout before paying for more, training, held-out success."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import (
    ADDRESSES,
    Runs,
    Server,
    Settings,
    Store,
    TrustRun,
    WithConsole,
    interval,
    one_store,
    own_config,
    print_columns,
    print_json,
    run_shown,
    say,
    store_setting,
    trained_checkpoint,
    with_store,
)
from agentlightning.errors import ConfigError, ConflictError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.config.run import Config
    from agentlightning.trainer.check import CheckResult, HeldOutResult
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.training import TrainResult

EXIT_UNFINISHED = 75
"""With --run: the run was told to end before its last step, so whatever restarts what fails (a Job) goes on with it."""

ConfigFile = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file with the configuration.")]
Resume = Annotated[str | None, typer.Option("--resume", help="Continue this run from its last checkpoint.")]
Rerun = Annotated[
    str | None,
    typer.Option("--rerun", help="Start this run again as a new run: same settings; code and tasks must be the same."),
]
ChangedOk = Annotated[
    bool, typer.Option("--changed-ok", help="With --rerun: start it even though its code or tasks have changed.")
]
Env = Annotated[
    str | None,
    typer.Option(
        "--env", help="An environment, such as textarena:FrozenLake-v0, in place of agent and tasks: agl env list."
    ),
]
Agent = Annotated[str | None, typer.Option("--agent", help="file.py:name, or a command such as 'node agent.js'.")]
Tasks = Annotated[str | None, typer.Option("--tasks", help="Training tasks: file, hub:NAME or file.py:name.")]
Val = Annotated[str | None, typer.Option("--val", help="Held-out tasks.")]
Reward = Annotated[str | None, typer.Option("--reward", help="Reward function file.py:name.")]
Model = Annotated[str | None, typer.Option("--model", help="Hub name or folder of the model.")]
ChatTemplate = Annotated[
    str | None, typer.Option("--chat-template", help="In place of the model's chat template: chatml, or a file.")
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        help="lightning_rl, or offline: sft, rft, distill, dpo, kto. One that is not the file's has none of its settings.",
    ),
]
FromRun = Annotated[
    list[str] | None,
    typer.Option("--from-run", help="Learn from this run's rollouts, in place of tasks. May be repeated."),
]
ListAlgorithms = Annotated[
    bool, typer.Option("--list-algorithms", help="List algorithms, credit rules, advantages and losses; train nothing.")
]
NamedRun = Annotated[
    str | None,
    typer.Option(
        "--run", help="Id of the run, which is started, or goes on where it was: for what restarts by itself."
    ),
]


def check(
    config: ConfigFile = None,
    env: Env = None,
    agent: Agent = None,
    tasks: Tasks = None,
    val: Val = None,
    reward: Reward = None,
    model: Model = None,
    chat_template: ChatTemplate = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help="Training tasks for the base success.", show_default="32; with --attempts all"
        ),
    ] = None,
    attempts: Annotated[
        int | None,
        typer.Option("--attempts", min=2, help="Try each task so often: pass rates, which training reads again."),
    ] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Try the agent: one rollout, then the base success.

    Prints the calls, tokens and reward of one task, the success over a few, and what a run would take.
    """
    from agentlightning.analysis.rollout_view import print_rollout
    from agentlightning.trainer.check import ShownRollout, check_agent

    given = given_settings(agent, _options(env, tasks, val, reward, model, chat_template))
    loaded = _fresh(config, given, settings or [], store, runs)

    def work(folder: RunFolder, display: Display) -> Coroutine[Any, Any, CheckResult]:
        def show(one: ShownRollout) -> None:
            print_rollout(display.console, one.rollout, one.attempts, one.calls, one.rewards, feedback=one.feedback)

        most = limit if attempts else limit or 32
        return check_agent(loaded, folder, display, most, show, attempts or 1)

    done = run_shown(f"check {config or loaded.source_name}", runs, work)
    if done.failure is not None:
        raise done.failure
    side_calls = done.side_calls if done.trains else None
    for note in filter(None, (side_calls, *done.causes, done.warning, done.privacy_note)):
        say(f"note: {note}", style="yellow")
    kinds = _print_rates(done) if attempts else {}
    print_json(_figures(done) | kinds)


def _figures(done: CheckResult) -> dict[str, Any]:
    """The last line of a check: its first rollout, the base success, the speed and the longest row."""
    from agentlightning.trainer.load_trajectories import used_tokens

    used = [used_tokens(call) for call in done.calls]
    figures: dict[str, Any] = {
        "calls": len(done.calls),
        "prompt_tokens": sum(prompt for prompt, _ in used),
        "sampled_tokens": sum(sampled for _, sampled in used),
        "forked_calls": sum(call.fork_cause is not None for call in done.calls),
        "reward": done.rollout.reward,
        "base_success": done.success,
        "tasks": done.tasks,
    }
    for measured in (done.speed, done.room):
        figures |= {} if measured is None else measured.figures
    return figures


def _print_rates(done: CheckResult) -> dict[str, int]:
    """Prints the pass rates of a check, and which tasks a cut would leave out; returns how many there are of each kind."""
    from agentlightning.analysis.task_rates import task_rates
    from agentlightning.cli.runs import print_task_rates

    found = task_rates(done.rollout.run_id, done.rollouts)
    kinds = found.tags[0].tasks
    print_task_rates(found)
    say(
        f"of {len(found.tasks)} tasks {kinds['sometimes']} have something to compare; a cut leaves out the {kinds['never']} "
        f"never and the {kinds['always']} always solved. Training with data.sampler = 'learnability' begins with these rates"
    )
    return kinds


def evaluate(
    target: Annotated[
        str | None, typer.Argument(help="Id of a run (its last checkpoint) or a TOML file (its model).")
    ] = None,
    env: Env = None,
    agent: Agent = None,
    tasks: Tasks = None,
    val: Val = None,
    reward: Reward = None,
    model: Model = None,
    chat_template: ChatTemplate = None,
    attempts: Annotated[
        int, typer.Option("--attempts", min=1, help="Try each task so often at temperature 1: pass@k and best of k.")
    ] = 1,
    tag: Annotated[
        str | None, typer.Option("--tag", help="With --attempts, also by the values of this field of the tasks.")
    ] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Measure the success on held-out tasks, greedily and at T = 1.

    An external model (model.path = "external:NAME") runs every task once, sampled as the agent asks.
    """
    if tag is not None and attempts == 1:
        raise ConfigError("--tag: expected --attempts with it")
    from agentlightning.trainer.check import evaluate_model
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.policies import with_models

    given = given_settings(agent, _options(env, tasks, val, reward, model, chat_template))
    if target is None or target.endswith(".toml"):
        given.setdefault("data.train", val)  # a configuration needs training tasks; an evaluation runs none of them
        given = {name: value for name, value in given.items() if value is not None or name.startswith("agent.")}
        config = _fresh(None if target is None else Path(target), given, settings or [], store, runs)
    elif given:
        raise ConfigError("a run is evaluated with its own agent and tasks; give no others, or evaluate a file")
    else:
        folder = RunFolder(runs, target)
        config = own_config(folder, settings, store)
        config = with_models(config, policies_in(Path(trained_checkpoint(config.store.url, folder).path)))
    title = f"eval {target or config.source_name}"
    found = run_shown(title, runs, lambda own, display: evaluate_model(config, own, display, title, attempts))
    several = _print_passes(found, attempts, tag) if attempts > 1 else {}
    print_json({"target": target or config.source_name, **found.success, **several})


def _print_passes(found: HeldOutResult, attempts: int, tag: str | None) -> dict[str, Any]:
    """Prints pass@k and the best of k; returns them as an evaluation's JSON has them."""
    from agentlightning.analysis.pass_at_k import pass_rows, read_tries

    tries = read_tries(found.rollouts, {name: value >= 1 for name, value in found.solved.items()}, tag)
    rows = pass_rows(tries, attempts)
    table = [(tag or "tasks", "k", "tasks", "pass@k", "best of k")]
    for one in rows:
        both = interval(one.solved, ".3f"), interval(one.best, ".3f")
        table.append((one.tag or "all", str(one.k), str(one.tasks), *both))
    print_columns(table)
    return {"attempts": attempts, "pass_at_k": rows}


def train(
    config: ConfigFile = None,
    resume: Resume = None,
    rerun: Rerun = None,
    changed_ok: ChangedOk = False,
    trust_run: TrustRun = False,
    env: Env = None,
    agent: Agent = None,
    tasks: Tasks = None,
    val: Val = None,
    reward: Reward = None,
    model: Model = None,
    chat_template: ChatTemplate = None,
    algorithm: Algorithm = None,
    from_run: FromRun = None,
    list_parts: ListAlgorithms = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list-algorithms: print JSON.")] = False,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
    server: Server = None,
    console: WithConsole = False,
    run: NamedRun = None,
) -> None:
    """Train the model behind an agent. Ctrl-C ends after the step that is under way and prints the line that resumes.

    With --from-run and no file, the model, its engine and the agent that is evaluated are those of that run.
    """
    if list_parts:
        list_algorithms(config, as_json)
        return
    if as_json:
        raise ConfigError("--json: expected --list-algorithms with it")
    url = one_store(store, server)
    given = _options(env, tasks, val, reward, model, chat_template)
    given |= {"algorithm.type": algorithm, "data.from_run": from_run or None}
    chosen = given_settings(agent, given)
    if rerun is not None:
        if any((config, resume, run, chosen, settings)):
            raise ConfigError("--rerun: takes all settings from that run; give no others")
        _rerun(rerun, changed_ok, trust_run, url, runs)
    elif changed_ok or trust_run:
        raise ConfigError(f"--{'changed-ok' if changed_ok else 'trust-run'}: expected --rerun RUN with it")
    elif run is not None and resume is not None:
        raise ConfigError("--run: starts a run or goes on with it; give --run or --resume, not both")
    elif resume is not None:
        if config is not None or chosen:
            raise ConfigError("--resume goes on with the run's own configuration; give no other settings with it")
        _resume(resume, settings, url, runs, console)
    else:
        _start(run, partial(_fresh, config, chosen, settings or [], url, runs), settings or [], url, runs, console)


def _resume(run: str, settings: list[str] | None, url: str | None, runs: Path, console: bool) -> None:
    from agentlightning.trainer.checkpoint import RunFolder

    folder = RunFolder(runs, run)
    run_and_report(own_config(folder, settings, url), folder, resume=True, console=console)


def _start(
    run: str | None, fresh: Callable[[], Config], settings: list[str], url: str | None, runs: Path, console: bool
) -> None:
    """Starts a new run; of --run, goes on with the run of this id if it was started before.

    A command that is repeated as it is (by a container, by a Job) names settings of the first start: the run has those.
    """
    from agentlightning.store.rules import check_run_id
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.training import new_run_id

    known = None
    if run is not None:
        check_run_id(run)
        addresses = [one for one in settings if one.partition("=")[0].strip() in ADDRESSES]
        with suppress(NotFoundError):
            known = own_config(RunFolder(runs, run), addresses, url)
    folder = RunFolder(runs, run or new_run_id())
    done = run_and_report(known or fresh(), folder, resume=known is not None, console=console)
    if run is not None and not done.finished:
        raise typer.Exit(EXIT_UNFINISHED)


def _rerun(run: str, changed_ok: bool, trust_run: bool, store: str | None, runs: Path) -> None:
    """Starts a training run again. ConflictError where code or tasks differ from those that it was made of, before anything
    is imported; without `trust_run`, by configuration and hashes in its folder, which no author of records can write."""
    from agentlightning.runtime.code_loader import is_code
    from agentlightning.store.open import store_url
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.checkpoint import Fingerprint, RunFolder, recorded_config, take_fingerprint
    from agentlightning.trainer.data.tasks import load_tasks
    from agentlightning.trainer.serving import is_training
    from agentlightning.trainer.training import new_run_id

    found = with_store(store, lambda opened: find_run(opened, run))
    if not is_training(found):
        raise ConflictError(f"--rerun: {run} is not a training run")
    url, folder = store_url(store), RunFolder(runs, run)
    then = None if trust_run else folder.fingerprint()
    if then is None and not trust_run:
        raise ConflictError(
            f"--rerun: {run} was not started in {runs}, so only its record says what code it ran, and whoever may write "
            "records could have changed that; if you trust them, add --trust-run"
        )
    config = recorded_config(found, url) if then is None else folder.config(url)
    then = then or Fingerprint.of_summary(found.summary)
    changed = [] if then.code == take_fingerprint(config, []).code else ["code"]
    source = config.data.train or ""
    if changed_ok or not changed or not is_code(source):  # else loading the tasks could run what was changed
        tasks = load_tasks(source, config.trainer.seed) if source else []
        changed += [] if then.data == take_fingerprint(config, tasks).data else ["data"]
    if changed and not changed_ok:
        raise ConflictError(
            f"{run}: {' and '.join(changed)} changed since the run was last started; to start it anyway, add --changed-ok"
        )
    run_and_report(config, RunFolder(runs, new_run_id()), name=found.name)


def _options(
    env: str | None,
    tasks: str | None,
    val: str | None,
    reward: str | None,
    model: str | None,
    chat_template: str | None,
) -> dict[str, Any]:
    """The options that train, check and eval share, by the settings that they stand for."""
    data = {"data.train": tasks, "data.val": val}
    return {"env.name": env, **data, "agent.reward": reward, "model.path": model, "model.chat_template": chat_template}


def given_settings(agent: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that options of the command line set, by their dotted names."""
    given = {name: value for name, value in options.items() if value is not None}
    if "data.from_run" in given:  # in place of the tasks in the file
        given.setdefault("data.train", None)
    if agent is not None:  # instead of the one in the file, whichever kind that is
        given |= {"agent.run": None, "agent.command": None, agent_setting(agent): agent}
    return given


def _fresh(file: Path | None, given: dict[str, Any], settings: list[str], url: str | None, runs: Path) -> Config:
    """The configuration of a new run, of the file, else of the run of --from-run, and the options given."""
    from agentlightning.config.file import load_config
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.model_weights import with_versions
    from agentlightning.trainer.schedules import inherited

    from_run, algorithm = given.get("data.from_run"), given.get("algorithm.type")
    if algorithm not in (None, "lightning_rl") and file is None and not from_run:
        raise ConfigError(f"--algorithm {algorithm}: give --from-run RUN to train on, or a file with data.from_run")
    if from_run and file is None:
        source = from_run[0]
        given = inherited(with_store(url, lambda opened: find_run(opened, source)).config) | given
        if not any(name.startswith("model") for name in [*given, *settings]):
            raise ConfigError(
                f"model: is required; run {source} has none to take over, or several (it was made of traces, or trains "
                "several policies): give --model"
            )
    return with_versions(load_config(file, settings, store_setting(url) | given), runs)


def agent_setting(agent: str) -> str:
    """The setting of an agent: agent.run for a function (file.py:name, package.module:name), else agent.command."""
    head, separator, name = agent.rpartition(":")
    named = bool(separator) and all(part.isidentifier() for part in name.split("."))
    named = named and (" " not in head or Path(head).is_file())
    # file.py alone is the one function in it that is marked with @rollout; a .pkl is how a function of a notebook travels.
    whole = agent.endswith((".py", ".pkl")) and " " not in agent
    return "agent.run" if named or whole else "agent.command"


def run_and_report(
    config: Config, folder: RunFolder, *, resume: bool = False, name: str = "", console: bool = False
) -> TrainResult:
    """Train under a live display, then say where things are."""
    from agentlightning.trainer.display import Display

    with Display(folder.run_id) as display:
        result = supervised(config, folder, display, resume=resume, name=name, console=console)
    report(display.console, result)
    return result


def supervised(
    config: Config, folder: RunFolder, display: Display, *, resume: bool = False, name: str = "", console: bool = False
) -> TrainResult:
    """Train with Ctrl-C handled: the first ends after the step that is under way, the second at once."""
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.training import Training

    training = Training(config, folder, display, console=console)
    return run_interruptible(partial(training.run, resume=resume, name=name), training.stop)


def report(console: Console, result: TrainResult) -> None:
    """Prints where the run, its policy and its curve are, if that was drawn."""
    curve = result.folder / "curve.png"
    places = {"run folder": result.folder, "policy": result.policy} | ({"curve": curve} if curve.exists() else {})
    for label, place in places.items():
        console.print(f"{label:<11} {place}", soft_wrap=True)


def list_algorithms(file: Path | None, as_json: bool) -> None:
    """Prints algorithms, credit rules, advantages, losses and aggregations, each with its source and settings.

    file: a configuration, whose own parts ``file.py:name`` are listed, too.
    """
    from agentlightning.algorithms.catalog import catalog, named_in
    from agentlightning.config.file import load_config
    from agentlightning.trainer.policies import policy_configs

    configs = policy_configs(load_config(file)).values() if file is not None else ()
    own = dict.fromkeys(entry for config in configs for entry in named_in(config.algorithm))
    entries = [*catalog(), *own]
    if as_json:
        print_json(entries)
        return
    for kind in dict.fromkeys(entry.kind for entry in entries):
        rows = [(kind, "from", "source", "settings")]
        of_kind = [entry for entry in entries if entry.kind == kind]
        print_columns([*rows, *((one.name, one.where, one.source, ", ".join(one.settings)) for one in of_kind)])
        say()
