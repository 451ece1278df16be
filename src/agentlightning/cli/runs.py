"""``agl runs``: the runs of a store."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentlightning.cli.options import (
    Json,
    RunId,
    Runs,
    Settings,
    Store,
    interval,
    number,
    print_columns,
    print_json,
    say,
    seconds_of,
    time_text,
    with_store,
)
from agentlightning.cli.rewards import print_reward_report
from agentlightning.errors import ConfigError, ConflictError

if TYPE_CHECKING:
    from agentlightning.analysis.bottlenecks import BottleneckReport, Lane
    from agentlightning.analysis.compare import RunComparison
    from agentlightning.analysis.suggestions import EarlierRun, Suggestions
    from agentlightning.analysis.task_rates import TaskReport
    from agentlightning.records import Call, Run
    from agentlightning.store.base import LightningStore

BAR = 40
"""Columns of a lane that fills the whole step."""
MAX_VALUE_CHARS = 40
"""Characters of a setting that a table shows."""
CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "assistant_message_edited": "the agent sent an answer back changed",
        "tool_result_rewritten": "the agent changed the result of a tool",
        "system_or_tools_changed": "the agent changed the system message or the tools",
        "history_cut": "the agent left out a part of the history",
        "history_edited": "the agent changed another message, or put one in between",
        "template_rewrites_history": "the model's chat template writes earlier answers anew",
    }
)

RowForm = Literal["messages", "preferences", "training-trace", "atif"]
EXPORT_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "records": ("--format",),
        "messages": ("--reward", "--threshold"),
        "preferences": ("--reward", "--margin"),
        "traces": (),
        "training-trace": (),
        "atif": (),
    }
)
"""Options of an export, by its form."""

Force = Annotated[bool, typer.Option("--force", help="Also a run that is running.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

app = typer.Typer(help="Runs of a store: settings, figures, exports.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_runs(
    store: Store = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="List at most this many runs.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Also the runs of agl check.")] = False,
    runs: Runs = Path("runs"),
    queue: Annotated[
        bool, typer.Option("--queue", help="Only the queued and running work of each running run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List runs, newest first.

    One that says it runs, and whose process on this machine is gone, was killed.
    """
    if queue:
        _list_queues(store, as_json)
        return
    from agentlightning.analysis.run_settings import tags_of
    from agentlightning.trainer.serving import CHECK

    found = with_store(store, lambda opened: opened.runs(limit=limit if everything else None))
    found = [run for run in found if everything or run.name != CHECK][:limit]
    if as_json:
        print_json([{**asdict(run), "state": state_of(run, runs), "tags": tags_of(run)} for run in found])
        return
    rows = [["run", "name", "tags", "state", "step", "reward", "held-out greedy", "created (UTC)"]]
    for run in found:
        rewards = [run.summary.get(name) for name in ("train/reward_mean", "eval/greedy/reward_mean")]
        row = [run.id, run.name, " ".join(tags_of(run)), state_of(run, runs), str(run.summary.get("step", ""))]
        row += [*map(number, rewards), time_text(run.created_ns)]
        rows.append(row)
    print_columns(rows, "no run yet; start one with: agl demo")


def _list_queues(store: str | None, as_json: bool) -> None:
    found = with_store(store, lambda opened: opened.statistics())
    if as_json:
        print_json(found)
        return
    rows = [("run", "queued", "oldest queued", "running", "leases expiring", "workers")]
    for one in found:
        oldest = f"{one.oldest_queued_s:.0f} s" if one.queued else "-"
        rows.append((one.run_id, str(one.queued), oldest, str(one.running), str(one.expiring), str(one.workers)))
    print_columns(rows, "no run is running")


def state_of(run: Run, runs: Path) -> str:
    """The run's state; killed where it says that it runs, was trained in its folder here, and no process holds that.

    A training, or a search for prompts, that was killed or failed is listed with the line that resumes it.
    """
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.run_lease import is_elsewhere, resume_line
    from agentlightning.trainer.serving import is_search, is_training

    folder = RunFolder(runs, run.id)
    here = (folder.path / "lock").exists() and not is_elsewhere(run, folder)
    state = "killed" if run.state == "running" and here and not folder.is_held else run.state
    if not here or state not in ("killed", "failed") or not (is_training(run) or is_search(run)):
        return state
    return f"{state}; {resume_line(folder.path, 'optimize' if is_search(run) else 'train')}"


@app.command("show")
def show_run(
    run: RunId,
    drift: Annotated[
        bool, typer.Option("--drift", help="Show which calls do not continue the tokens sampled before, and why.")
    ] = False,
    bottlenecks: Annotated[
        bool,
        typer.Option("--bottlenecks", help="Show where the time of its steps goes, what bounds it and the remedy."),
    ] = False,
    latest: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            max=1000,
            help="With --bottlenecks: average so many of the latest steps.",
            show_default="10",
        ),
    ] = None,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Show how often each task was solved: never, sometimes, always.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="FIELD", help="With --tasks: also by the values of this field.")
    ] = None,
    rewards: Annotated[
        bool, typer.Option("--rewards", help="Show each reward's distribution by step and call, and signs of hacking.")
    ] = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Show a run: settings, counts, latest metrics and warnings."""
    views = {"--drift": drift, "--bottlenecks": bottlenecks, "--tasks": tasks, "--rewards": rewards}
    if len(chosen := [option for option, given in views.items() if given]) > 1:
        raise ConfigError(f"{chosen[0]}: conflicts with {chosen[1]}")
    for option, value, needed in (("--tag", tag, "--tasks"), ("--steps", latest, "--bottlenecks")):
        if value is not None and not views[needed]:
            raise ConfigError(f"{option}: expected {needed} with it")
    if tasks:
        from agentlightning.analysis.task_rates import read_task_rates

        rates = with_store(store, lambda opened: read_task_rates(opened, run, tag))
        print_json(rates) if as_json else print_task_rates(rates, tag)
    elif bottlenecks:
        from agentlightning.analysis.bottlenecks import read_bottlenecks

        found = with_store(store, lambda opened: read_bottlenecks(opened, run, latest or 10))
        print_json(found) if as_json else _print_bottlenecks(found)
    elif rewards:
        print_reward_report(store, run, as_json)
    else:
        with_store(store, lambda opened: (_show_drift if drift else _show_run)(opened, run, as_json))


SHOWN_TASKS = 20


def print_task_rates(found: TaskReport, tag: str | None = None) -> None:
    """Prints how many tasks were never, sometimes and always solved, and the hardest of them."""
    if not found.tasks:
        say("no training rollout has finished yet")
        return
    from agentlightning.analysis.task_rates import KINDS

    head = (tag or "tasks", *KINDS, "tries", "solved")
    rows = [(one.tag or "all", *(str(one.tasks[kind]) for kind in KINDS), str(one.rate.n)) for one in found.tags]
    print_columns([head, *((*row, interval(one.rate, ".2f")) for row, one in zip(rows, found.tags, strict=True))])
    say()
    shown = [("task", "kind", "tries", "solved", "at first", "at last")]
    for one in found.tasks[:SHOWN_TASKS]:
        (_, first, of_first), (_, last, of_last) = one.steps[0], one.steps[-1]
        counts = f"{first} of {of_first}", f"{last} of {of_last}"
        shown.append((one.title[:60], one.kind, str(one.rate.n), interval(one.rate, ".2f"), *counts))
    print_columns(shown)
    if len(found.tasks) > SHOWN_TASKS:
        say(f"and {len(found.tasks) - SHOWN_TASKS} easier ones; --json prints all")


async def _show_run(store: LightningStore, run: str, as_json: bool) -> None:
    import orjson

    from agentlightning.analysis.compare import amount_text, read_cost
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.monitor.health_checks import active_alarms
    from agentlightning.trainer.monitor.metrics import group_of, in_order

    found = await find_run(store, run)
    metrics = await store.metrics(run)
    latest = {metric.name: metric for metric in metrics if not metric.abandoned}
    cost, counts, checkpoints = await read_cost(store, run), await store.count(run), await store.checkpoints(run)
    if as_json:
        rollouts = [{"mode": mode, "state": state, "count": count} for (mode, state), count in sorted(counts.items())]
        parts = {"rollouts": rollouts, "checkpoints": checkpoints, "cost": cost, "warnings": active_alarms(found)}
        print_json({"run": found, "metrics": {name: one.value for name, one in latest.items()}, **parts})
        return
    say(f"{found.id}  {found.name}  {found.state}  created {time_text(found.created_ns)} UTC")
    screen().print_json(orjson.dumps(found.config).decode())
    for (mode, state), count in sorted(counts.items()):
        say(f"{mode} rollouts {state}: {count}")
    for checkpoint in checkpoints:
        say(f"checkpoint step {checkpoint.step}: {_place(checkpoint.path)}")
    if undone := sorted({metric.step for metric in metrics if metric.abandoned}):
        say(f"steps that a crash undid: {', '.join(map(str, undone))}; their metrics are left out")
    group = ""
    for name in in_order(latest):
        if group_of(name) != group:
            group = group_of(name)
            say(f"{group}:")
        say(f"  {name}: {latest[name].value:.4g} (step {latest[name].step})")
    if cost.amounts:
        told = ", ".join(f"{name} {amount_text(value)}" for name, value in cost.amounts.items())
        say(f"cost of its training steps{', about' if cost.estimated else ''}: {told}")
    for name, text in active_alarms(found).items():
        say(f"warning {name}: {text}")


def _place(path: str) -> str:
    """Path or URL of a checkpoint, with a note if the folder is not there."""
    gone = "://" not in path and not Path(path).is_dir()
    return f"{path}  (not here: deleted by trainer.keep_checkpoints, or on another host)" if gone else path


async def _show_drift(store: LightningStore, run: str, as_json: bool) -> None:
    """Counts how the prompts of a run's calls continued the tokens that its policy had sampled, a page at a time.

    It judges nothing: what each call's prompt did, and why, was decided by the gateway when the call was made.
    """
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import find_run, read_rollouts

    await find_run(store, run)
    kinds, tokens, rollouts = Counter[str](), Counter[str](), 0
    async for page in read_rollouts(store, RolloutQuery(run_id=run)):
        rollouts += len(page)
        for call in await store.calls([rollout.id for rollout in page]):
            _count_call(call, kinds, tokens)
    if as_json:
        print_json({"rollouts": rollouts, "calls": kinds, "tokens": tokens})
        return
    external = kinds.pop("external", 0)
    calls = kinds.total()
    if not calls:
        say(f"no calls of the policy are recorded in {rollouts} rollouts")
        return
    firsts, continued = kinds.pop("first_turn", 0), kinds.pop("continued", 0)
    lost = tokens["untrained"] / max(1, tokens["sampled"])
    rows = [
        (calls, f"calls of the policy, in {rollouts:,} rollouts"),
        (firsts, "first turns: nothing came before that they could continue"),
        (continued, "continued: the prompt begins with an earlier call's prompt and answer, id by id"),
        (kinds.total(), "forks: the prompt repeats an earlier answer, but not with the ids sampled"),
        *((count, f"    {cause}: {CAUSES.get(cause, 'unknown cause')}") for cause, count in kinds.most_common()),
        (tokens["sampled"], "sampled tokens"),
        (tokens["untrained"], f"sampled tokens that forks repeat as context only ({lost:.2%} of all sampled)"),
        *([(external, "calls answered by external models, not counted above")] if external else []),
    ]
    width = max(len(f"{count:,}") for count, _ in rows)
    for count, words in rows:
        say(f"{count:>{width},}  {words}")
    successors = calls - firsts
    share = f"{continued / successors:.2%} of the {successors:,} calls that have a predecessor" if successors else ""
    say(f"exact share: {share or 'no call has a predecessor'}", style="bold")


def _count_call(call: Call, kinds: Counter[str], tokens: Counter[str]) -> None:
    if not call.policy:
        kinds["external"] += 1  # nothing of it is trained
        return
    kinds[call.continuation] += 1
    tokens["sampled"] += len(call.sampled_ids)
    tokens["untrained"] += call.untrained_tokens


@app.command("tag")
def tag_run(
    run: RunId,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Words; none takes all away.")] = None,
    store: Store = None,
) -> None:
    """Replace the tags of a run, to find it by."""
    from agentlightning.analysis.run_settings import TAGS
    from agentlightning.config.run import MonitorConfig, parse_settings

    checked = parse_settings(MonitorConfig, {"tags": tags or []}, "agl runs tag").tags
    with_store(store, lambda opened: opened.update_run(run, summary={TAGS: list(checked)}))
    typer.echo(f"{run}: {' '.join(checked) or 'no tag'}")


@app.command("compare")
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Ids of 2 to 20 runs; the first is the baseline.")
    ],
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Compare runs: settings, figures, and what chance may explain."""
    from agentlightning.analysis.compare import compare_runs

    found = with_store(store, lambda opened: compare_runs(opened, runs))
    print_json(found) if as_json else _print_comparison(found)


def _print_comparison(found: RunComparison) -> None:
    ids = [one.run_id for one in found.figures]
    rows = [("setting", *ids), *((one.name, *map(_value, one.values)) for one in found.settings)]
    print_columns(rows, "the runs have the same settings")
    say()
    figures = [("run", "state", "step", "held-out", "best", "90 % of it at step", "reward per step at the end")]
    for one in found.figures:
        held_out = "-" if one.held_out is None else f"{one.held_out:.3f} at {one.held_out_step}"
        best = "-" if one.best is None else f"{one.best:.3f} at {one.best_step}"
        near, slope = number(one.near_best_step, "d"), interval(one.slope, "+.4f")
        figures.append((one.run_id, one.state, number(one.step, "d"), held_out, best, near, slope))
    print_columns(figures)
    say()
    for each in found.differences:
        what = f"{each.run_id} - {each.baseline}: "
        if each.difference is None:
            say(f"{what}{each.tasks} held-out tasks in common: too few to compare")
            continue
        sure = "" if each.difference.excludes_zero else "; chance alone may do that"
        say(f"{what}{interval(each.difference, '+.3f')} over {each.tasks} held-out tasks{sure}")
    for band in found.bands:
        if len(band.run_ids) > 1 and band.held_out:
            last = band.held_out[-1]
            seeds = f"{len(band.run_ids)} seeds ({', '.join(band.run_ids)})"
            say(f"{seeds}: held-out {last.mean:.3f}, from {last.low:.3f} to {last.high:.3f} at step {last.step}")


def _value(value: object) -> str:
    import orjson

    if isinstance(value, float):
        return f"{value:.3g}"
    text = value if isinstance(value, str) else "-" if value is None else orjson.dumps(value, default=str).decode()
    return text if len(text) <= MAX_VALUE_CHARS else f"…{text[1 - MAX_VALUE_CHARS :]}"


def _print_bottlenecks(found: BottleneckReport) -> None:
    if not found.steps:
        say("no training step has ended yet")
        return
    say(f"a step takes {found.step_s:.3g} s, mean of {found.steps}")
    for title, lanes in (
        ("phases of a step", found.phases),
        ("a rollout, from queueing to its end", found.rollout),
        ("busy during a step", found.busy),
    ):
        if lanes:
            say(f"\n{title}:")
            print_columns([_lane(lane) for lane in lanes])
    say()
    for finding in found.findings:
        say(f"{finding.name} (up to {finding.gain:.0%}): {finding.text}")
        say(f"    {finding.change}: {', '.join(finding.settings)}")
    if not found.findings:
        say("nothing bounds it by itself: no rule finds more than a tenth of the time")


def _lane(lane: Lane) -> tuple[str, ...]:
    seconds = "" if lane.seconds is None else f"{lane.seconds:.3g} s"
    return f"  {lane.name}", f"{lane.share:.0%}", seconds, "█" * round(BAR * lane.share)


@app.command("suggest")
def suggest(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run that is planned.")],
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Suggest settings, by the evidence of earlier runs."""
    from agentlightning.analysis.suggestions import suggest as suggest_from_store
    from agentlightning.config.file import load_config
    from agentlightning.config.run import run_record
    from agentlightning.trainer.defaults import with_defaults
    from agentlightning.trainer.policies import policy_configs

    planned = load_config(config, settings or [])
    if all(Path(own.model.path).expanduser().is_dir() for own in policy_configs(planned).values()):
        planned = asyncio.run(with_defaults(planned, lambda _: None))  # as earlier runs recorded them
    record = run_record(planned)
    found = with_store(store, lambda opened: suggest_from_store(opened, record))
    print_json(found) if as_json else _print_suggestions(found)


def _print_suggestions(found: Suggestions) -> None:
    say(f"{found.comparable} comparable runs, {found.finished} of them finished with a held-out reward")
    for alarm in found.active:
        say(f"run {alarm.run_id} has alarm {alarm.name}: {alarm.text}", style="yellow")
    for rule in found.rules:
        say(f"{rule.alarm}: {rule.text}")
        say(f"  with it: {', '.join(rule.alarmed)}; without: {', '.join(rule.quiet) or 'none'}")
    if found.best:
        print_columns([("best runs", "held-out", "state", "alarms", "differs in"), *map(_earlier, found.best)])
    if found.proposals:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
        say(f"settings by importance, over {found.finished} runs: {shares}")
        say("settings to try:")
        for settings in found.proposals:
            say(f"  {', '.join(f'{name} = {_value(value)}' for name, value in settings.items())}")
    if found.no_proposals is not None:
        say(f"no settings are suggested: {found.no_proposals}")


def _earlier(one: EarlierRun) -> tuple[str, ...]:
    differs = "; ".join(f"{each.name} {_value(each.values[1])}" for each in one.differs) or "nothing"
    return one.run_id, number(one.held_out), one.state, ", ".join(one.alarms) or "-", differs


@app.command("export")
def export(
    run: RunId,
    to: Annotated[
        str, typer.Option("--to", help="New folder; of --as: new .jsonl file, or the URL of an OTLP/HTTP endpoint.")
    ],
    kind: Annotated[
        Literal["records", "traces", RowForm],
        typer.Option(
            "--as",
            help="records: a file per kind; else a row per conversation, pair or trace.",
        ),
    ] = "records",
    format: Annotated[
        Literal["jsonl", "parquet"] | None,
        typer.Option("--format", help="Of records: jsonl or parquet.", show_default="jsonl"),
    ] = None,
    reward: Annotated[
        str | None, typer.Option("--reward", help="Name of the reward that counts; default: the final one.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="With messages: only rollouts with at least this reward.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option("--margin", help="With preferences: rewards must differ by more than this.")
    ] = None,
    store: Store = None,
) -> None:
    """Write a run to files, or its rollouts as rows.

    To export its model: agl models export.

    The rows are messages with rewards, preferences between two rollouts of one task, OpenTelemetry traces, or
    tokens in the forms of OpenEnv and Harbor. Headers of an OTLP endpoint come from OTEL_EXPORTER_OTLP_HEADERS.
    """
    given = {"--format": format, "--reward": reward, "--threshold": threshold, "--margin": margin}
    for option, value in given.items():
        if value is not None and option not in EXPORT_OPTIONS[kind]:
            raise ConfigError(f"{option}: conflicts with --as {kind}")
    if kind == "traces":
        with_store(store, lambda opened: _export_traces(opened, run, to))
    elif kind == "records":
        _export_records(store, run, Path(to), format or "jsonl")
    else:
        _export_rows(store, run, Path(to), kind, reward, threshold if kind == "messages" else margin)


def _export_records(store: str | None, run: str, to: Path, format: Literal["jsonl", "parquet"]) -> None:
    from agentlightning.store.export import export_run

    with _progress(run) as on_progress:
        counts = with_store(store, lambda opened: export_run(opened, run, to, format, on_progress))
    written = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing but the run"
    typer.echo(f"{written}: {to}")


def _export_rows(store: str | None, run: str, to: Path, kind: RowForm, reward: str | None, bound: float | None) -> None:
    """bound: of messages the least reward, of preferences the least difference."""
    from agentlightning.traces.export import TokenTraceExport
    from agentlightning.trainer.data.export_dataset import DatasetExport

    if to.exists():
        raise ConfigError(f"--to: {to} exists already")
    if not to.parent.is_dir():
        raise ConfigError(f"--to: there is no folder {to.parent}")

    async def work(opened: LightningStore) -> tuple[int, Counter[str]]:
        if kind in ("training-trace", "atif"):
            traces = TokenTraceExport(store=opened, run_id=run, form=kind)
            return await _write_rows(traces.rows(), to), traces.left_out
        rows = DatasetExport(store=opened, run_id=run, reward=reward)
        found = rows.conversations(bound) if kind == "messages" else rows.preferences(bound or 0.0)
        return await _write_rows(found, to), rows.left_out

    try:
        written, left_out = with_store(store, work)
    except BaseException:
        to.unlink(missing_ok=True)
        raise
    for reason, count in left_out.most_common():
        if count:
            typer.echo(f"note: left out {count}: {reason}", err=True)
    typer.echo(f"{written} rows: {to}")


async def _write_rows(rows: AsyncIterator[Mapping[str, Any]], to: Path) -> int:
    """The number of rows."""
    import orjson

    from agentlightning.runtime.disk import open_private

    count = 0
    with open_private(to, "wb") as file:
        async for row in rows:
            file.write(orjson.dumps(row) + b"\n")
            count += 1
    return count


async def _export_traces(store: LightningStore, run: str, to: str) -> None:
    """Sends the finished rollouts of a run to an OTLP/HTTP endpoint, or writes them to a new .jsonl file, a trace each."""
    from agentlightning.store.scan import find_run
    from agentlightning.tracing import exporters
    from agentlightning.tracing.exporters import resource_of

    remote = to.startswith(("http://", "https://"))
    headers = exporters.headers_of(os.environ)
    exporter = (
        exporters.OtlpHttpExporter(to, headers, timeout_s=30.0) if remote else exporters.OtlpFileExporter(Path(to))
    )
    sent = spans = 0
    await find_run(store, run)
    async with exporter:
        async for rollouts in exporters.finished_rollouts(store, run):
            spans += await exporters.send_rollouts(store, rollouts, exporter, resource_of(run))
            sent += len(rollouts)
    rejected = f", of which {exporter.rejected} are rejected: {exporter.reason}" if exporter.rejected else ""
    typer.echo(f"{sent} rollouts, {spans} spans: {to}{rejected}")


@app.command("delete")
def delete(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]…", help="Ids of runs.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Delete runs unchanged for this long: 30d, 12h, 8w.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    store: Store = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Delete runs and all their records, by id or by age. Checkpoint folders stay on disk.

    By age, running ones never go. Deleting a prompt search also deletes the run RUN-optimizer, which records its optimizer
    model's calls.
    """
    age_s = seconds_of(older_than, "--older-than")
    if bool(runs) == (age_s is not None) or (runs and dry_run):
        raise ConfigError("agl runs delete: give ids of runs, or --older-than (this one with --dry-run)")
    if age_s is None:
        with_store(store, lambda opened: _delete(opened, runs or [], force, yes))
    else:
        with_store(store, lambda opened: _delete_old(opened, age_s, dry_run, yes))


async def _delete(store: LightningStore, runs: Sequence[str], force: bool, yes: bool) -> None:
    from agentlightning.trainer.prompts.optimizer_model import OPTIMIZER_RUN

    for run in dict.fromkeys(runs):
        await _refuse_running(store, run, force)
    names = {OPTIMIZER_RUN.format(run_id=run): f"optimizer {run}" for run in runs}
    optimizer_runs = [run.id for run in await store.runs(list(names)) if run.name == names[run.id]]
    _ask(f"delete {', '.join(dict.fromkeys([*runs, *optimizer_runs]))} permanently?", yes)
    deleted = await store.delete_runs(runs)  # first: where this is refused, the optimizer's runs stay, too
    typer.echo(f"{deleted + await store.delete_runs(optimizer_runs)} deleted")


async def _delete_old(store: LightningStore, age_s: float, dry_run: bool, yes: bool) -> None:
    import time

    before_ns = time.time_ns() - int(age_s * 1e9)
    old = [run for run in await store.runs() if run.state != "running" and run.updated_ns < before_ns]
    for run in old:
        typer.echo(f"{run.id}  {run.name}  {run.state}: unchanged since {time_text(run.updated_ns)} UTC")
    if old and not dry_run:
        _ask(f"delete these {len(old)} runs permanently?", yes)
    deleted = 0
    for run in () if dry_run else old:
        try:
            deleted += await store.delete_runs([run.id])
        except ConflictError as refused:  # an alias names one of its models; the others go
            typer.echo(f"{run.id} is kept: {refused}")
    typer.echo(f"{len(old)} runs would be deleted" if dry_run else f"{deleted} runs deleted")


async def _refuse_running(store: LightningStore, run: str, force: bool) -> None:
    from agentlightning.store.scan import find_run

    if (await find_run(store, run)).state == "running" and not force:
        raise ConflictError(f"{run}: is running; end it first (or, where its trainer has ended for good, add --force)")


def _ask(question: str, yes: bool) -> None:
    """On a terminal; a program that calls this has decided already."""
    import sys

    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True)


@contextmanager
def _progress(run: str) -> Iterator[Callable[[int, int], Any]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"{run} rollouts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
