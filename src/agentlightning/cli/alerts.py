"""``agl alerts``: what runs warn of, what people said of it, and rules of a server for Prometheus and Grafana."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Json, RunId, Store, print_json, with_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentlightning.records import JSON, Run
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.monitor.alert_state import ShownAlert

app = typer.Typer(help="List, acknowledge and silence alarms of runs.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="ALARM", help="Name of the alarm, as agl alerts list shows it.")]


@app.command("list")
def list_alerts(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Id of a run; all runs with alarms if none.")
    ] = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """List the alarms of a run, those that ended too, or those that hold of all runs."""
    import time
    from dataclasses import asdict

    from agentlightning.store.scan import find_run
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.monitor.alert_state import shown_alerts

    async def work(opened: LightningStore) -> list[Run]:
        return await opened.runs() if run is None else [await find_run(opened, run)]

    now_ns = time.time_ns()
    found = [(one.id, alert) for one in with_store(store, work) for alert in shown_alerts(one, now_ns)]
    if run is None:
        found = [(run_id, alert) for run_id, alert in found if alert.text is not None]
    if as_json:
        print_json({"alerts": [{"run_id": run_id, **asdict(alert)} for run_id, alert in found]})
        return
    for run_id, alert in found:
        screen().print(f"{run_id}  {_line(alert, now_ns)}", soft_wrap=True, markup=False)
    if not found:
        screen().print("nothing is warned of")


@app.command("ack")
def acknowledge_alert(run: RunId, name: Name, store: Store = None) -> None:
    """Acknowledge an alarm that holds: it is told again once it ended and came back."""
    from agentlightning.trainer.monitor.alert_state import acknowledged

    _change(run, lambda found: acknowledged(found, name), store)


@app.command("silence")
def silence_alert(
    run: RunId,
    name: Name,
    hours: Annotated[float, typer.Option("--hours", min=0, max=87600, help="For so long; 0 ends it.")] = 24.0,
    store: Store = None,
) -> None:
    """Silence an alarm of a run: until then it is neither printed nor sent, and still listed."""
    import time

    from agentlightning.trainer.monitor.alert_state import silenced

    until_ns = time.time_ns() + int(hours * 3600e9) if hours else 0
    _change(run, lambda found: silenced(found, name, until_ns), store)


@app.command("prometheus")
def print_prometheus_rules() -> None:
    """Print a rules file for the Prometheus that scrapes a server's /metrics."""
    from agentlightning.analysis.server_alerts import prometheus_rules

    typer.echo(prometheus_rules(), nl=False)


@app.command("grafana")
def print_grafana_dashboard() -> None:
    """Print a dashboard to import into Grafana: a panel for each rule, with its bound as a line."""
    from agentlightning.analysis.server_alerts import grafana_dashboard

    print_json(grafana_dashboard())


def _line(alert: ShownAlert, now_ns: int) -> str:
    state = alert.state
    if state == "silenced":
        state += f" for {(alert.silenced_until_ns - now_ns) / 3600e9:.1f} h"
    since = "" if alert.since_step is None else f" since step {alert.since_step}"
    return f"{alert.name} [{state}{since}]{'' if alert.text is None else f': {alert.text}'}"


def _change(run_id: str, change: Callable[[Run], JSON], store: str | None) -> None:
    from agentlightning.store.scan import find_run

    async def work(opened: LightningStore) -> None:
        await opened.update_run(run_id, summary=change(await find_run(opened, run_id)))

    with_store(store, work)
