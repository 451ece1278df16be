"""Light is tested by what is imported, not by the clock."""

import subprocess
import sys

HEAVY = {
    *("torch", "transformers", "fastapi", "starlette", "uvicorn", "sqlalchemy", "matplotlib", "numpy", "openai"),
    *("jinja2", "llguidance", "tokenizers", "renderers", "fsspec", "s3fs", "botocore"),
}
CODE = """
import sys
import agentlightning.cli.app
print(*sys.modules)
import agentlightning as agl
agl.LLM, agl.rollout, agl.emit_reward, agl.AgentLightningClient, agl.LightningStoreClient, agl.LightningRL, agl.Trainer
import agentlightning.runner.__main__, agentlightning.adapters, agentlightning.tracing.air, agentlightning.tracing.exporters
print(*sys.modules)
"""


def test_agents_workers_and_the_command_line_load_nothing_heavy_and_help_no_configuration() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    for_help, all_of_it = ({name.partition(".")[0] for name in line.split()} for line in done.stdout.splitlines())
    assert for_help & {"pydantic", "aiohttp"} == set()  # the checks of settings are half of the time that help may take
    assert all_of_it & HEAVY == set()
