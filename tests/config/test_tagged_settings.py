"""A setting that is one of several tables: told apart by `type`, and each knows its own settings only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from agentlightning.config.base import Table, Tagged, parse_settings
from agentlightning.errors import ConfigError

OPTIMIZER = "file: engine.optimizer"


class Plain(Table):
    type: Literal["plain"] = "plain"
    decay: float = 0.0


class Fancy(Table):
    type: Literal["fancy"] = "fancy"
    rate: float = Field(0.1, gt=0)


class Plugin(Table):
    type: str
    settings: dict[str, Any] = Field({})


class Engine(Table):
    optimizer: Annotated[Plain | Fancy, Tagged()] = Plain()
    loss: Annotated[Plain | Fancy | Plugin, Tagged(other=Plugin)] = Plain()


class Settings(Table):
    engine: Engine = Engine()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, Plain()),
        ({"optimizer": "fancy"}, Fancy()),
        ({"optimizer": {"type": "fancy", "rate": 2}}, Fancy(rate=2)),
        ({"optimizer": {"decay": 0.5}}, Plain(decay=0.5)),
        ({"optimizer": Fancy(rate=3)}, Fancy(rate=3)),
    ],
)
def test_a_choice_is_a_name_a_table_or_an_object(table: dict[str, Any], expected: Table) -> None:
    settings = parse_settings(Settings, {"engine": table}, "file")

    assert settings.engine.optimizer == expected
    assert parse_settings(Settings, settings.model_dump(mode="json"), "file") == settings


def test_every_further_name_is_the_other_table() -> None:
    loss = {"type": "file.py:mine", "settings": {"beta": 1}}

    assert parse_settings(Engine, {"loss": loss}, "file").loss == Plugin(type="file.py:mine", settings={"beta": 1})


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"optimizer": "sgd"}, f"{OPTIMIZER}: expected one of 'plain', 'fancy', got 'sgd'"),
        ({"optimizer": 3}, f"{OPTIMIZER}: expected a name, or a table with the name as its type, got 3"),
        ({"optimizer": {"type": "fancy", "rate": 0}}, f"{OPTIMIZER}.rate: expected a number greater than 0, got 0"),
        ({"optimizer": {"type": "fancy", "rat": 1}}, f"{OPTIMIZER}.rat: no such setting; did you mean 'rate'?"),
        ({"optimizer": {"type": "fancy", "decay": 1}}, f"{OPTIMIZER}.decay: no such setting; known here: type, rate"),
        ({"optimiser": "fancy"}, "file: engine.optimiser: no such setting; did you mean 'optimizer'?"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_one_sentence_with_the_settings_name(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_settings(Settings, {"engine": table}, "file")

    assert str(refused.value) == sentence
