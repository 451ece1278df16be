"""Light is tested by what is imported, not by the clock."""

import subprocess
import sys

import pytest

HEAVY = {
    *("torch", "transformers", "fastapi", "starlette", "uvicorn", "sqlalchemy", "matplotlib", "numpy", "openai"),
    *("jinja2", "llguidance", "tokenizers", "renderers", "fsspec", "s3fs", "botocore"),
}


def imported_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import agentlightning",
        "import agentlightning as agl; agl.LLM, agl.rollout, agl.emit_reward, agl.AgentLightningClient",
        "import agentlightning as agl; agl.LightningStoreClient, agl.LightningRL, agl.Trainer",
        "import agentlightning.cli.app",
        "import agentlightning.runner.__main__",
        "import agentlightning.adapters, agentlightning.tracing.air, agentlightning.tracing.exporters",
    ],
)
def test_agents_workers_and_the_command_line_load_nothing_heavy(code: str) -> None:
    assert imported_by(code) & HEAVY == set()


def test_the_command_line_prints_its_help_without_the_configuration() -> None:
    """Its checks are half of the time that help may take."""
    assert imported_by("import agentlightning.cli.app") & {"pydantic", "aiohttp"} == set()


def test_help_lists_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("demo", "train", "check", "eval", "models", "serve", "worker", "runs", "rollouts"):
        assert f"  {command} " in done.stdout
