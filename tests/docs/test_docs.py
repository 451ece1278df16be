"""The documents say what is: settings, commands, files, errors and links are compared with the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from agentlightning import errors, records, training_types
from agentlightning.algorithms.credit.tree import RolloutTree
from agentlightning.algorithms.critic import Gae
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.losses import Importance, OffPolicyMask, PpoClip, RatioMask
from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.algorithms.rewards import SoftPenalty
from agentlightning.analysis.bottlenecks import RULES
from agentlightning.cli.app import app
from agentlightning.config.agent import AgentConfig, Bubblewrap, Container, EnvConfig, KubernetesJob, RewardConfig
from agentlightning.config.engine import EngineConfig, FsdpLearner, Muon, PolicyConfig, VllmSampler, VllmServerSampler
from agentlightning.config.external import ExternalModelConfig
from agentlightning.config.prompts import OptimizeConfig
from agentlightning.config.run import Config, LimitConfig, LimitsConfig
from agentlightning.serving.settings import ServeConfig
from agentlightning.store.summaries import RolloutSummary
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS
from agentlightning.trainer.monitor.metrics import METRICS
from agentlightning.trainer.monitor.trackers import TRACKERS
from agentlightning.trainer.schedules import OFFLINE_ALGORITHMS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "agentlightning"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
RUN_BY_USERS = ("bash", "sh", "console")


def fences(page: Path, *languages: str) -> list[str]:
    """Bodies of the page's code blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the table rows whose first cell is a name in backticks."""
    for line in text.splitlines():
        if re.match(r"\| (&nbsp; )?`", line):
            yield [cell.strip().removeprefix("&nbsp; ") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def settings_tables() -> dict[str, dict[str, Any]]:
    """Every setting with its default, by table; `...` where it is required."""
    tables: dict[str, dict[str, Any]] = {}
    for name, table in Config.model_fields.items():
        if name == "algorithm":
            tables[name] = {"type": "lightning_rl", "schedule": None}
            tables[name] |= {field.name: field.default for field in dataclasses.fields(LightningRL)}
            parts = {"rollouts": [RolloutTree], "advantage": [Gae], "loss": [PpoClip], "truncated": [SoftPenalty]}
            for part, kinds in (parts | {"correction": [Importance, RatioMask, OffPolicyMask]}).items():
                known = {key: value for kind in kinds for key, value in defaults(kind).items() if key != "type"}
                tables[f"algorithm.{part}"] = known
        elif name == "engine":
            tables |= {"engine": defaults(EngineConfig), "engine.optimizer": defaults(Muon)}
            tables["engine.sampler"] = defaults(VllmSampler) | defaults(VllmServerSampler)
            tables["engine.learner"] = defaults(FsdpLearner)
        elif name == "agent":
            tables |= {"agent": defaults(AgentConfig), "agent.reward": defaults(RewardConfig)}
        elif name == "sandbox":
            tables["sandbox"] = defaults(KubernetesJob) | defaults(Container) | defaults(Bubblewrap) | {"type": "none"}
        elif name == "env":
            tables["env"] = defaults(EnvConfig)
        elif name == "optimize":
            tables["optimize"] = defaults(OptimizeConfig)
        elif name == "external":
            tables["external.NAME"] = defaults(ExternalModelConfig)
        elif name == "limits":
            tables |= dict.fromkeys(("limits.attempt", "limits.run"), defaults(LimitConfig))
        elif name == "policies":
            tables["policies.NAME"] = defaults(PolicyConfig)
        else:
            tables[name] = defaults(table.annotation)  # type: ignore[arg-type]
    return tables


def defaults(table: type[BaseModel]) -> dict[str, Any]:
    """A choice counts as its `type`, which no table of settings repeats."""
    fields = {key: field for key, field in table.model_fields.items() if key != "type"}
    return {
        key: ... if field.is_required() else getattr(field.default, "type", field.default)
        for key, field in fields.items()
    }


def documented_default(cell: str) -> Any:
    if cell in ("required", "none"):
        return {"required": ..., "none": None}[cell]
    value = json.loads(cell.strip("`"))
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("table", settings_tables())
def test_the_configuration_page_has_every_setting_with_its_default(table: str) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.split(f"## [{table}]\n")[1].split("\n## ")[0]

    documented = {cells[0].strip("`"): documented_default(cells[1]) for cells in rows(section)}

    assert documented == settings_tables()[table]


def test_the_common_settings_are_few_and_have_their_defaults() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    begin = [*rows(text.split("\n## Common settings\n")[1].split("\n## ")[0])]
    assert len(begin) <= 24
    for name, default, _ in begin:
        table, _, setting = name.strip("`").rpartition(".")
        assert documented_default(default) == settings_tables()[table][setting]


@pytest.mark.parametrize("name", OFFLINE_ALGORITHMS)
def test_the_page_about_the_record_has_every_setting_of_its_algorithms(name: str) -> None:
    text = (
        (ROOT / "docs" / "offline-training.md").read_text(encoding="utf-8").split("## Settings\n")[1].split("\n## ")[0]
    )
    shared, *sections = text.split("\n### ")
    (own,) = (section for section in sections if section.startswith(f"{name}\n"))

    documented = {cells[0].strip("`"): documented_default(cells[1]) for cells in (*rows(shared), *rows(own))}

    assert documented == {field.name: field.default for field in dataclasses.fields(OFFLINE_ALGORITHMS[name])}
    assert {cells[0].strip("`") for cells in rows(shared)} == {
        field.name for field in dataclasses.fields(OfflineAlgorithm)
    }


def test_the_errors_page_has_every_error_with_its_exit_code_and_status() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("\n## ")[0]

    documented = {cells[0].strip("`"): (int(cells[1]), int(cells[2])) for cells in rows(text)}

    tree = {
        name: (value.exit_code, value.http_status)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AgentLightningError)
    }
    assert documented == tree


def test_the_metrics_page_has_every_number_by_group_and_every_warning() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    numbers = {cells[0].strip("`"): cells[1] for cells in rows(text.split("\n## Metrics\n")[1])}
    warnings = [cells[0].strip("`") for cells in rows(text.split("\n## Health checks\n")[1].split("\n## ")[0])]
    findings = [cells[0].strip("`") for cells in rows(text.split("\n## Bottlenecks\n")[1].split("\n## ")[0])]
    trackers = [cells[0].strip("`") for cells in rows(text.split("\n## Trackers\n")[1].split("\n## ")[0])]

    assert numbers == METRICS
    assert sorted(warnings) == sorted(HEALTH_CHECKS)
    assert sorted(findings) == sorted(RULES)
    assert sorted(trackers) == sorted(TRACKERS)


@pytest.fixture(scope="module")
def cli() -> Any:
    """The command line, made once: that takes a third of a second."""
    return typer.main.get_command(app)


def commands(page: Path) -> Iterator[list[str]]:
    """Every `agl …` that the page shows, in words."""
    text = page.read_text(encoding="utf-8")
    lines = [line for body in fences(page, *RUN_BY_USERS) for line in body.splitlines()]
    lines += re.findall(r"`(agl [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        words = shlex.split(line, comments=True)
        if words and words[0].rpartition("/")[2] == "agl":
            yield words[1:]


@BY_NAME
def test_every_command_and_option_in_the_documents_exists(page: Path, cli: Any) -> None:
    for words in commands(page):
        command, rest = cli, list(words)
        while hasattr(command, "commands") and rest and not rest[0].startswith("--"):  # a group alone, too
            assert rest[0] in command.commands, f"agl {' '.join(words)}"
            command = command.commands[rest.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - known
        assert not unknown, f"agl {' '.join(words)}"


@BY_NAME
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        path, _, section = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if section:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert section in anchors, f"{page.name} links to {target}"


def named_pages(nav: list[Any]) -> Iterator[str]:
    """Files that a navigation names, whatever depth they stand at."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from named_pages(below if isinstance(below, list) else [below])


def test_the_site_shows_every_page() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]

    shown = sorted(named_pages(site["nav"]))

    pages = [page.relative_to(ROOT).as_posix() for page in PAGES if page.name != "AGENTS.md"]
    assert shown == sorted(pages)


def test_the_glossary_has_every_record_and_no_other() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").split("\n## Records\n")[1].split("\n## ")[0]

    listed = [name for cells in rows(text) for name in re.findall(r"`(\w+)`", cells[0])]

    classes = {**vars(records), **vars(training_types), "RolloutSummary": RolloutSummary}
    known = [name for name, value in classes.items() if dataclasses.is_dataclass(value)]
    assert sorted(listed) == sorted(known)


def test_the_rules_have_every_room_and_no_other() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split("## The rooms of `src/agentlightning`\n")[1]
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}

    assert {name for cells in rows(text.split("\n## ")[0]) for name in re.findall(r"`(\w+)`", cells[0])} >= rooms


def test_the_rules_name_every_benchmark_with_figures_of_its_own() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    programs = [path.name for path in ROOT.glob("benchmarks/*.py") if "argparse" in path.read_text(encoding="utf-8")]

    assert [name for name in programs if f"`{name}`" not in text] == []


@BY_NAME
def test_python_snippets_compile(page: Path) -> None:
    for number, body in enumerate(fences(page, "python"), 1):
        compile(body, f"{page.name}, Python block {number}", "exec")


@BY_NAME
def test_names_that_snippets_take_from_the_package_exist(page: Path) -> None:
    import agentlightning

    for body in fences(page, "python"):
        for name in re.findall(r"\bagl\.(\w+)", body):
            assert name in agentlightning.__all__, f"{page.name}: agl.{name}"


@BY_NAME
def test_imports_that_snippets_make_from_the_package_exist(page: Path) -> None:
    for body in fences(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("agentlightning"):
                module = importlib.import_module(str(node.module))
                missing = [alias.name for alias in node.names if alias.name != "*" and not hasattr(module, alias.name)]
                assert missing == [], f"{page.name}: from {node.module}"


@BY_NAME
def test_toml_snippets_hold_settings_that_exist(page: Path) -> None:
    tables = settings_tables() | {"serve": defaults(ServeConfig)}
    for body in fences(page, "toml"):
        snippet = tomllib.loads(body)
        if "project" in snippet:  # of a package's pyproject.toml
            continue
        for name, settings in snippet.pop("external", {}).items():
            assert set(settings) <= set(tables["external.NAME"]), f"{page.name}: [external.{name}]"
        LimitsConfig(**snippet.pop("limits", {}))  # which refuses what it does not know
        for name, settings in snippet.pop("policies", {}).items():
            assert set(settings) <= set(tables["policies.NAME"]), f"{page.name}: [policies.{name}]"
            for table in ("algorithm", "engine"):
                assert set(settings.get(table, {})) <= set(tables[table]), f"{page.name}: [policies.{name}] {table}"
        if (name := snippet.get("algorithm", {}).get("type")) in OFFLINE_ALGORITHMS:
            own = {field.name for field in dataclasses.fields(OFFLINE_ALGORITHMS[name])}
            table = snippet.pop("algorithm")
            for entry in table.get("schedule", []):
                assert set(entry) <= {"from_step", "learning_rate", *tables["algorithm"]}, f"{page.name}: schedule"
            assert set(table) <= {"type", "schedule", *own}, f"{page.name}: [algorithm] of {name}"
        for table, settings in snippet.items():
            assert set(settings) <= set(tables[table]), f"{page.name}: [{table}]"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "compare-with-others.md"], ids=lambda page: page.name
)
def test_environment_variables_in_the_documents_are_used_somewhere(page: Path) -> None:
    code = "".join(
        path.read_text(encoding="utf-8") for folder in (SOURCE, ROOT / "examples") for path in folder.rglob("*.py")
    )

    named = set(re.findall(r"\bAGL_[A-Z_]+\b", page.read_text(encoding="utf-8")))

    assert sorted(name for name in named if name not in code) == []


@BY_NAME
def test_no_figure_is_left_to_be_filled_in(page: Path) -> None:
    assert re.findall(r"\{\{\w+\}\}", page.read_text(encoding="utf-8")) == []
