"""``agl models canary``: a new version for a share of the sessions, promoted or rolled back by its rule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Json, Store, print_columns, print_json, with_store
from agentlightning.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from agentlightning.config.canary import CanaryConfig
    from agentlightning.config.serve import HeaderRoute
    from agentlightning.records import JSON
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.canary.controller import CanaryTrial

app = typer.Typer(
    help="Give a version a share of the sessions of a served model, and follow what becomes of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Run = Annotated[
    str | None, typer.Option("--run", help="Id of the run that serves; default: the one that serves the model.")
]
LOAD_TIMEOUT_S = 600.0


@app.command("start")
def start(
    version: Annotated[str, typer.Argument(metavar="NAME@REF", help="The version: a number or an alias.")],
    weight: Annotated[
        float | None, typer.Option("--weight", min=0, max=1, help="Share of new sessions; default: 0.1.")
    ] = None,
    header: Annotated[
        str | None, typer.Option("--header", metavar="NAME=VALUE", help="Sessions that begin with it get the canary.")
    ] = None,
    rule: Annotated[
        Path | None, typer.Option("--rule", help="TOML file with [canary]: when it is promoted or rolled back.")
    ] = None,
    manual: Annotated[bool, typer.Option("--manual", help="A person decides: no rule.")] = False,
    shadow: Annotated[
        float, typer.Option("--shadow", min=0, max=1, help="Share of new sessions whose calls it gets copies of.")
    ] = 0.0,
    run: Run = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Load a version beside the stable one, then give it its share of new sessions. Open sessions stay as they are."""
    from agentlightning.config.canary import CanaryConfig
    from agentlightning.config.file import read_toml
    from agentlightning.config.serve import RoutesConfig
    from agentlightning.gateway.sessions.routes import version_alias
    from agentlightning.store.model_versions import parse_reference
    from agentlightning.store.scan import find_model_version
    from agentlightning.trainer.canary.controller import put_routes, read_trial

    name = parse_reference(version, "NAME@REF").name
    route = _header(header)
    if manual and rule is not None:
        raise ConfigError("--manual: goes without --rule")
    if shadow and (weight or header is not None or rule is not None):
        raise ConfigError("--shadow: goes without --weight, --header and --rule; nobody gets what the canary says")
    weight = 0.0 if shadow else 0.1 if weight is None else weight
    settings = None if manual or shadow else CanaryConfig() if rule is None else _rule(read_toml(rule), str(rule))

    async def work(opened: LightningStore) -> JSON:
        run_id = await _serving_run(opened, name, run)
        number = (await find_model_version(opened, version, "NAME@REF")).number
        before = await read_trial(opened, run_id)
        stable = before.routes.stable
        if number == stable:
            raise ConfigError(f"{version}: is the stable version already")
        # Without a share at first: no session begins with a version that is not loaded yet.
        announced = RoutesConfig(stable=stable, canary=number)
        waiting = await put_routes(opened, run_id, announced, after=before.version)
        await _wait_loaded(opened, run_id, name, number)
        if shadow:
            await _check_tokenizers(opened, run_id, [version_alias(name, one) for one in (stable, number)])
        routes = RoutesConfig(stable=stable, canary=number, weight=weight, header=route, rule=settings, shadow=shadow)
        await put_routes(opened, run_id, routes, after=waiting.version)
        return {"run_id": run_id, **routes.model_dump(mode="json")}

    started = with_store(store, work)
    if as_json:
        print_json(started)
    else:
        share = f"{weight:.0%} of new sessions" + ("" if header is None else f", and those with {header}")
        share = f"copies of the calls of {shadow:.0%} of new sessions" if shadow else share
        typer.echo(f"{name}@{started['canary']} beside {name}@{started['stable']}: {share} of run {started['run_id']}")


@app.command("status")
def status(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the served model.")],
    run: Run = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Print the routes, the figures of the canary's sessions and the others so far, or of copied calls, and the last
    decision."""
    from agentlightning.trainer.canary.controller import read_figures, read_trial
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> tuple[CanaryTrial, JSON]:
        run_id = await _serving_run(opened, name, run)
        trial = await read_trial(opened, run_id)
        return trial, await read_figures(opened, run_id, trial)

    trial, found = with_store(store, work)
    routes = trial.routes
    if as_json:
        print_json({"routes": routes.model_dump(mode="json"), **found})
        return
    if routes.reason:
        typer.echo(f"last decision: {routes.reason.get('decision')} of {routes.reason.get('canary')}")
    numbers = found or routes.reason
    figures, shadow = numbers.get("figures") or {}, numbers.get("shadow") or {}
    if routes.canary is None:
        typer.echo(f"no canary: new sessions get {name}@{routes.stable}")
    elif routes.shadow:
        typer.echo(f"{name}@{routes.canary} gets copies of the calls of {routes.shadow:.0%} of new sessions")
    else:
        decides = "a person decides" if routes.rule is None else f"verdict so far: {found['verdict'] or 'none'}"
        typer.echo(f"{name}@{routes.canary} gets {routes.weight:.0%} beside {name}@{routes.stable}; {decides}")
    if figures:
        rows: list[tuple[str, ...]] = [("measure", "stable", "sessions", "canary", "sessions", "worse", "not worse")]
        rows += [_row(measure, one) for measure, one in figures.items()]
        print_columns(screen(), rows)
    if shadow:
        print_columns(screen(), [("measure", "served", "copy"), *_shadow_rows(shadow)])


@app.command("stop")
def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the served model.")],
    run: Run = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Give all new sessions the stable version again. Sessions that began with the canary stay with it to their end."""
    from agentlightning.config.serve import RoutesConfig
    from agentlightning.trainer.canary.controller import put_routes, read_figures, read_trial

    async def work(opened: LightningStore) -> JSON:
        run_id = await _serving_run(opened, name, run)
        trial = await read_trial(opened, run_id)
        routes = trial.routes
        if routes.canary is None:
            raise ConfigError(f"{name}: has no canary")
        found = await read_figures(opened, run_id, trial)
        named = {"stable": f"{name}@{routes.stable}", "canary": f"{name}@{routes.canary}"}
        reason = {"decision": "stop", **named, **found}
        await put_routes(opened, run_id, RoutesConfig(stable=routes.stable, reason=reason), after=trial.version)
        return reason

    stopped = with_store(store, work)
    print_json(stopped) if as_json else typer.echo(f"new sessions get {stopped['stable']}")


def _header(text: str | None) -> HeaderRoute | None:
    from agentlightning.config.serve import HeaderRoute

    if text is None:
        return None
    name, found, value = text.partition("=")
    if not found or not name:
        raise ConfigError(f"--header: expected NAME=VALUE, got {text!r:.80}")
    return HeaderRoute(name=name.lower(), value=value)


def _rule(table: JSON, where: str) -> CanaryConfig:
    from agentlightning.config.canary import CanaryConfig
    from agentlightning.config.run import parse_settings

    if set(table) != {"canary"} or not isinstance(table["canary"], dict):
        raise ConfigError(f"{where}: expected one table, [canary]")
    return parse_settings(CanaryConfig, table["canary"], f"{where}: canary", ".")


async def _serving_run(store: LightningStore, name: str, run: str | None) -> str:
    """The run that serves a model. NotFoundError where none does, ConfigError where several do."""
    if run is not None:
        return run
    found = [one.id for one in await store.runs() if one.name == f"serve {name}" and one.state == "running"]
    if not found:
        raise NotFoundError(f"{name}: no run serves it; start one with: agl serve --policy {name}@production")
    if len(found) > 1:
        raise ConfigError(f"--run: is required, since several runs serve {name}: {', '.join(found)}")
    return found[0]


async def _wait_loaded(store: LightningStore, run_id: str, name: str, number: int) -> None:
    """Returns when a version is served. NotFoundError where that takes too long."""
    import time

    from agentlightning.gateway.sessions.routes import version_alias

    alias, known = version_alias(name, number), dict[str, int]()
    end_s = time.monotonic() + LOAD_TIMEOUT_S
    while (left_s := end_s - time.monotonic()) > 0:
        for one in await store.wait_resources(run_id, known, min(30.0, left_s)):
            known[one.name] = one.version
            if one.name == alias and not one.value.get("released"):
                return
    raise NotFoundError(f"{name}@{number}: is not served within {LOAD_TIMEOUT_S:.0f} s; the log of agl serve says why")


async def _check_tokenizers(store: LightningStore, run_id: str, aliases: list[str]) -> None:
    """ConfigError where the versions have other tokenizers: the tokens of a call mean nothing to both then."""
    found = {one.name: one.value.get("tokenizer") for one in await store.resources(run_id)}
    if found.get(aliases[0]) != found.get(aliases[1]):
        raise ConfigError(
            f"--shadow: {' and '.join(aliases)} have other tokenizers; calls of one cannot be copied to the other"
        )


def _shadow_rows(figures: JSON) -> list[tuple[str, ...]]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    rows: list[tuple[str, ...]] = [("calls", str(figures["calls"]), str(figures["completed"]))]
    rows += [(name, shown(one["served"]), shown(one["copy"])) for name, one in figures["measures"].items()]
    rows += [("same completion", "", shown(figures["equal"])), ("dropped", "", str(figures["dropped"]))]
    return [*rows, *((f"failed: {code}", "", str(count)) for code, count in figures["failed"].items())]


def _row(measure: str, one: JSON) -> tuple[str, ...]:
    def shown(arm: JSON) -> tuple[str, str]:
        return ("-" if arm["mean"] is None else f"{arm['mean']:.3f}"), str(arm["sessions"])

    evidence = (f"{one[side]['wealth']:.3g} of {one[side]['bound']:.3g}" for side in ("worse", "not_worse"))
    return (measure, *shown(one["stable"]), *shown(one["canary"]), *evidence)
