"""Tables of the documents that the code can tell: extras, targets, layers, credit rules, metrics, codes of refusals."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator

import pytest
from test_docs import ROOT, SOURCE, rows

from agentlightning.algorithms.credit import CREDIT
from agentlightning.algorithms.prompts import PROMPT_ALGORITHMS
from agentlightning.algorithms.prompts.racing import RacedSearch
from agentlightning.gateway.metrics import GatewayMetrics, StoreMetrics
from agentlightning.store.sql.store import InMemoryLightningStore

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def page(name: str, title: str) -> str:
    """The text of a page below this title, up to the next one of its rank."""
    text = (ROOT / name).read_text(encoding="utf-8").split(f"\n{title}\n")[1]
    return text.split(f"\n{title.split()[0]} ")[0]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_readme_has_every_extra() -> None:
    documented = [extra for cells in rows(page("README.md", "## Install")) for extra in named(cells[0])]

    assert sorted(documented) == sorted(PROJECT["project"]["optional-dependencies"])


def test_the_layers_of_the_architecture_page_are_those_that_are_checked() -> None:
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [sorted(re.findall(r"agentlightning\.(\w+)", layer)) for layer in contract]

    table = re.findall(r"^\| \d+ \| (.+?) \|", page("docs/architecture.md", "## Layers"), re.MULTILINE)

    documented = [sorted({name.partition("_")[0] for name in named(row)}) for row in table]
    merged: list[list[str]] = []
    for layer in checked:  # files of settings are one row
        row = sorted({name.partition("_")[0] for name in layer})
        merged += [row] if row not in merged else []
    assert documented == merged


def test_the_page_about_algorithms_has_every_credit_rule_with_its_settings() -> None:
    table = {cells[0].strip("`"): cells[2] for cells in rows(page("docs/algorithms.md", "## Credit"))}

    assert sorted(table) == sorted(CREDIT)
    for name, cell in table.items():
        settings = {
            setting: parameter.default
            for setting, parameter in inspect.signature(CREDIT[name].function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        assert sorted(re.findall(r"`(\w+)`", cell)) == sorted(settings), name
        for setting, number in re.findall(r"`(\w+)` \(([\d.]+)", cell):
            assert float(number) == settings[setting], f"{name}: {setting}"


def test_the_page_about_algorithms_has_every_search_over_prompts_with_its_settings() -> None:
    section = page("docs/algorithms.md", "## Searches over prompts")
    shared = {field.name: field.default for field in dataclasses.fields(RacedSearch)}
    documented = {cells[0].strip("`"): cells[1] for cells in rows(section.split("| setting of both |")[1])}

    assert documented == {name: str(default) for name, default in shared.items()}
    assert {cells[0].strip("`") for cells in rows(section)} >= set(PROMPT_ALGORITHMS)


def test_the_pages_have_every_metric_of_a_server() -> None:
    metrics = GatewayMetrics()
    metrics.watch_engines(lambda: ())
    store = InMemoryLightningStore()
    StoreMetrics(store, [], metrics.registry)
    offered = set(re.findall(r"^# TYPE (agl_\w+)", metrics.text().decode(), re.MULTILINE))

    tables = page("docs/rollouts.md", "## Over HTTP") + page("docs/store.md", "## Inspect")
    documented = {name for cells in rows(tables) for name in named(cells[0]) if re.fullmatch(r"agl_\w+", name)}

    assert documented == {name for name in offered if not name.endswith("_created")}


def refusals() -> Iterator[str]:
    """Codes of refusals that the gateway's own code makes, and the protocols'."""
    for file in (*SOURCE.glob("gateway/*.py"), *SOURCE.glob("protocols/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code" and called == "ApiError"]
            given += node.args[1:2] if called == "failed" else []  # of endpoint.Question
            yield from (str(one.value) for one in given if isinstance(one, ast.Constant))


@pytest.mark.parametrize("code", sorted(set(refusals())))
def test_the_errors_page_has_every_code_of_a_refusal(code: str) -> None:
    table = lines(page("docs/errors.md", "## Gateway responses"))

    assert [row for row in table if code in named(row[1])], code


def test_every_code_on_the_errors_page_is_one_of_the_gateways() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))

    documented = {name for row in lines(page("docs/errors.md", "## Gateway responses")) for name in named(row[1])}

    assert [name for name in sorted(documented) if f'"{name}"' not in code] == []


def lines(text: str) -> Iterator[list[str]]:
    """Cells of the rows whose first cell is a number."""
    for line in text.splitlines():
        if re.match(r"\| \d+ \|", line):
            yield [cell.strip() for cell in line.split("|")[1:-1]]
