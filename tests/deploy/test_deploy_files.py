"""The files of a deployment: what is found, what is written, and that our own commands and metrics are as they say."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from deployed_project import CONFIG, CONFIGS, make_project
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.deploy.project import find_dependencies, read_project
from agentlightning.deploy.render import TARGETS, _words, render, write_files
from agentlightning.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]
EVERY = [
    (name, target) for target in TARGETS for name in (CONFIGS if target in ("compose", "kubernetes") else ["local"])
]


def rendered(tmp_path: Path, config: str, target: str) -> dict[str, str]:
    return render(read_project(make_project(tmp_path / "bot", config)), target, "deploy")  # type: ignore[arg-type]


# --- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"uv.lock": "", "pyproject.toml": "", "requirements.txt": "a"}, ("pyproject.toml", "uv.lock")),
        ({"requirements.txt": "a", "requirements-dev.txt": "b"}, ("requirements.txt",)),
        ({"requirements-agent.txt": "a", "requirements-test.txt": "b"}, ("requirements-agent.txt",)),
        ({"pyproject.toml": '[project]\nname = "a"\ndependencies = ["httpx"]'}, ("pyproject.toml",)),
    ],
)
def test_packages_are_found_in_the_file_that_fixes_most(
    tmp_path: Path, files: dict[str, str], found: tuple[str, ...]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    dependencies = find_dependencies(tmp_path)
    assert dependencies.files == found
    assert all(any(name in command for name in found) or "/tmp/agent.txt" in command or "export" in command
               for command in dependencies.commands)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "all_of_it"),
    [
        ("requirements.txt", "httpx==0.28.1 --hash=sha256:00\nmcp @ https://host/mcp.whl\n", False),
        ("requirements.txt", "-r base.txt\n", True),
        ("requirements.txt", "httpx\n-e .\n", True),
        ("requirements.txt", "--constraint=limits.txt\n", True),
        ("requirements.txt", "./packages/tool\n", True),
        ("requirements.txt", "tool @ file:packages/tool\n", True),
        ("pyproject.toml", '[project]\nname = "a"\ndynamic = [\n  "version", "dependencies",\n]\n', True),
        ("pyproject.toml", '[project]\nname = "a"\ndynamic = ["version"]\ndependencies = ["httpx"]\n', False),
    ],
)
def test_what_names_other_files_is_installed_after_they_are_copied(
    tmp_path: Path, name: str, text: str, all_of_it: bool
) -> None:
    (tmp_path / name).write_text(text)
    assert find_dependencies(tmp_path).files == ((".",) if all_of_it else (name,))


@pytest.mark.parametrize(("source", "all_of_it"), [('{ editable = "." }', False), ('{ editable = "tool" }', True)])
def test_a_lock_of_a_workspace_needs_all_of_it(tmp_path: Path, source: str, all_of_it: bool) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "uv.lock").write_text(f'[[package]]\nname = "a"\nsource = {source}\n')
    assert (find_dependencies(tmp_path).files == (".",)) == all_of_it


@pytest.mark.parametrize("name", ["a b.jsonl", "!a.jsonl", "#a.jsonl", "a*.jsonl", "$(id).jsonl", "a\nRUN id.jsonl"])
def test_a_name_that_files_of_images_would_read_as_something_else_is_refused(tmp_path: Path, name: str) -> None:
    config = make_project(tmp_path / "bot")
    (config.parent / name).write_text("{}")
    config.write_text(CONFIG.replace('"heldout.jsonl"', json.dumps(name)))
    with pytest.raises(ConfigError, match=r"data\.val: expected a path of letters"):
        read_project(config)
    config.unlink()
    with pytest.raises(ConfigError, match="CONFIG: expected a path of letters"):
        read_project(make_project(tmp_path / "bot").rename(config.with_name(name)))


def test_a_key_among_the_arguments_of_vllm_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["vllm"].replace("[external.judge]", 'arguments = ["--api-key", "secret"]\n[external.judge]')
    with pytest.raises(ConfigError, match=r"engine\.sampler\.arguments: --api-key would stand in the files"):
        read_project(make_project(tmp_path / "bot", config))


def test_what_links_lead_to_outside_of_the_projects_folder_is_refused(tmp_path: Path) -> None:
    config = make_project(tmp_path / "bot")
    for name, why in (
        ("heldout.jsonl", r"data\.val: .* lies outside of"),
        ("train.toml", "is a link to a file outside"),
    ):
        outside = (config.parent / name).rename(tmp_path / name)
        (config.parent / name).symlink_to(outside)
        with pytest.raises(ConfigError, match=why):
            read_project(config)
        outside.replace(config.parent / name)


def test_two_files_that_could_be_meant_are_an_error_that_names_both(tmp_path: Path) -> None:
    for name in ("requirements-a.txt", "requirements-b.txt"):
        (tmp_path / name).write_text("httpx")
    with pytest.raises(ConfigError, match=r"requirements-a\.txt, requirements-b\.txt"):
        find_dependencies(tmp_path)


def test_what_lies_outside_of_the_projects_folder_is_refused(tmp_path: Path) -> None:
    config = make_project(tmp_path / "bot")
    (tmp_path / "elsewhere.jsonl").write_text("{}")
    config.write_text(CONFIG.replace("train.jsonl", str(tmp_path / "elsewhere.jsonl")))
    with pytest.raises(ConfigError, match=r"data\.train: .*elsewhere\.jsonl lies outside of"):
        read_project(config)


def test_a_run_without_a_trainer_or_without_an_agent_is_refused(tmp_path: Path) -> None:
    external = '[model]\npath = "external:gpt"\n[external.gpt]\nurl = "https://api.openai.com/v1"\nmodels = ["gpt-5"]\n'
    for config, why in (
        (external + '[agent]\nrun = "agent.py:solve"\n[data]\ntrain = "train.jsonl"\n', "trains nothing"),
        ('[model]\npath = "hub/model"\n[data]\ntrain = "train.jsonl"\n', "agent: give either run"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_project(make_project(tmp_path / "bot", config))


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "target"), EVERY)
def test_the_same_project_gives_the_same_bytes_and_no_value_of_a_secret(tmp_path: Path, name: str, target: str) -> None:
    """Every variable that is a secret is a reference: ${NAME…} of Compose, a Secret's key, or nothing."""
    first, second = (rendered(tmp_path / place, CONFIGS[name], target) for place in ("one", "two"))
    assert first == second
    assert list(first) == sorted(first)
    assert str(tmp_path) not in "".join(first.values())
    for path, text in first.items():
        for line in text.splitlines():
            if assigned := re.match(r"\s*(?:export )?([A-Z_]*(?:_KEY|PASSWORD|TOKEN))\s*[:=]\s*(\S.*)", line):
                assert assigned[2].startswith(("$", "[")), f"{path}: {line}"


def test_targets_share_a_folder_and_nothing_of_others_is_written_over(config_file: Path) -> None:
    folder = config_file.parent / "deploy"
    runner = CliRunner()
    for target in ("docker", "compose", "kubernetes", "aws"):
        done = runner.invoke(app, ["deploy", target, str(config_file), "--to", str(folder)])
        assert done.exit_code == 0, done.output
    again = runner.invoke(app, ["deploy", "aws", str(config_file), "--to", str(folder)])
    assert ", 0 of them new or changed" in again.output
    (folder / "compose.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"compose\.yaml is there and is not what would be written"):
        write_files(folder, {"compose.yaml": "ours"})
    assert write_files(folder, {"compose.yaml": "ours"}, force=True) == ["compose.yaml"]
    assert (folder / "start.sh").stat().st_mode & 0o111


def test_the_commands_that_are_printed_stand_as_they_are(config_file: Path) -> None:
    folder = config_file.parent / "deploy"
    done = CliRunner().invoke(app, ["deploy", "docker", str(config_file), "--to", str(folder)])
    printed = [shlex.split(line) for line in done.stdout.split("next:\n")[1].splitlines()]
    assert printed[0] == ["cd", str(config_file.parent)]
    assert printed[1] == ["pip", "wheel", "--no-deps", "--wheel-dir", "deploy/wheels", str(CHECKOUT)]
    for words in printed[2:]:
        dockerfile = config_file.parent / words[words.index("--file") + 1]
        wheels = re.findall(
            r"^COPY (deploy/wheels)/agentlightning_gateway-0\.1\.0", dockerfile.read_text(), re.MULTILINE
        )
        assert wheels == ["deploy/wheels"], dockerfile
    compose = CliRunner().invoke(app, ["deploy", "compose", str(config_file), "--to", str(folder)])
    assert compose.stdout.splitlines()[-1] == "  deploy/start.sh"


def test_a_folder_outside_of_the_project_is_refused(config_file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["deploy", "docker", str(config_file), "--to", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError)
    assert "expected a folder inside" in str(done.exception)


def test_the_agents_image_leaves_out_the_tasks_and_the_others_do_not(tmp_path: Path) -> None:
    files = rendered(tmp_path, CONFIG, "docker")
    assert {"train.jsonl", "heldout.jsonl", "train.toml"} <= set(files["agent.Dockerfile.dockerignore"].splitlines())
    assert "train.jsonl" not in files["trainer.Dockerfile.dockerignore"]
    assert "reward.py" not in files["agent.Dockerfile.dockerignore"]


@pytest.mark.parametrize("config", CONFIGS.values())
def test_images_install_extras_that_there_are(tmp_path: Path, config: str) -> None:
    files = rendered(tmp_path, config, "docker")
    ours = set(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for image in ("server", "trainer"):
        (wheel,) = re.findall(r'--python \S+ "(/wheels/.*)"', files[f"{image}.Dockerfile"])
        asked = re.fullmatch(r"/wheels/agentlightning_gateway-\S+\.whl\[([\w,]+)\]", wheel)
        assert asked, wheel
        assert set(asked[1].split(",")) <= ours


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_words_of_a_command_are_read_by_yaml_as_they_were(words: list[str]) -> None:
    assert (yaml.safe_load(_words(words, 4)) or []) == words


# --- what the files say of us -----------------------------------------------------------------------------------------


def our_commands(files: dict[str, str]) -> list[list[str]]:
    """Every command of ours in these files: in images, services, pods and scripts."""
    found = []
    for path, text in files.items():
        if path == "compose.yaml":
            found += [each["command"] for each in yaml.safe_load(text)["services"].values() if "command" in each]
        elif path.startswith("kubernetes/") and path.endswith(".yaml"):
            for each in yaml.safe_load_all(text):
                pod = (each or {}).get("spec", {}).get("template", {}).get("spec", {})
                found += [one["command"] + one.get("args", []) for one in pod.get("containers", []) if "command" in one]
        elif path.endswith("Dockerfile"):
            found += [json.loads(line[4:]) for line in text.splitlines() if line.startswith("CMD [")]
        for line in re.findall(r"\bagl [a-z][^`\n)]*", text) if path.endswith((".sh", ".md")) else ():
            found.append(shlex.split(re.sub(r'"\$\{@[^}]*\}"', "", line)))
    return [words for words in found if words[0] == "agl"]


@pytest.mark.parametrize(("name", "target"), [one for one in EVERY if one[1] in ("compose", "kubernetes")])
def test_every_command_and_option_in_the_files_is_one_of_ours(tmp_path: Path, name: str, target: str) -> None:
    commands = our_commands(rendered(tmp_path, CONFIGS[name], target))
    assert {words[1] for words in commands} >= {"serve", "train", "worker", "console"}
    for words in commands:
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, words


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainers_command_makes_a_configuration(tmp_path: Path, name: str, target: str) -> None:
    """Its --set fit the file's settings: nothing conflicts, nothing is unknown."""
    from agentlightning.config.file import load_config

    files = rendered(tmp_path, CONFIGS[name], target)
    for words in (words for words in our_commands(files) if words[1] == "train"):
        settings = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
        config = load_config(tmp_path / "bot" / words[2], settings)
        assert config.agent.workers == 0
        assert config.engine.key_env == "SAMPLER_KEY"
        assert config.engine.sampler.type == ("vllm_server" if name == "vllm" else "local")


def test_every_pod_is_without_root_and_without_a_way_to_get_it(tmp_path: Path) -> None:
    files = rendered(tmp_path, CONFIGS["vllm"], "kubernetes")
    pods = [
        each["spec"]["template"]["spec"]
        for path, text in files.items()
        if path.startswith("kubernetes/") and path.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each["kind"] in ("Deployment", "StatefulSet", "Job")
    ]
    assert len(pods) == 5
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_no_container_has_an_init_that_shows_its_environment(tmp_path: Path) -> None:
    services = yaml.safe_load(rendered(tmp_path, CONFIGS["vllm"], "compose")["compose.yaml"])["services"]
    assert "worker" in services
    assert not any("init" in service for service in services.values())


def test_agents_reach_the_gateway_alone(tmp_path: Path) -> None:
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in yaml.safe_load_all(rendered(tmp_path, CONFIG, "kubernetes")["kubernetes/network.yaml"])
    }
    (rule,) = policies["agl-worker"]["egress"]
    assert rule["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "agl-server"}}}]
    assert rule["ports"] == [{"port": 8088}]
    denied = policies["agl-deny"]
    assert denied["podSelector"]["matchLabels"] == {"app.kubernetes.io/part-of": "agentlightning"}
    assert [port["port"] for rule in denied["egress"] for port in rule["ports"]] == [53, 53]


def test_workers_whose_attempts_are_jobs_may_make_them_and_no_more(tmp_path: Path) -> None:
    config = CONFIG.replace('run = "agent.py:solve"', 'command = "python agent.py"')
    files = rendered(
        tmp_path, f'{config}\n[sandbox]\ntype = "kubernetes"\nimage = "registry.example.com/agent:1"\n', "kubernetes"
    )
    worker = list(yaml.safe_load_all(files["kubernetes/worker.yaml"]))
    role = next(each for each in worker if each["kind"] == "Role")
    rights = {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]}
    assert rights == {
        "jobs": ["create", "get", "list", "watch", "delete"],
        "secrets": ["create", "get"],
        "pods": ["get", "list", "watch"],
        "pods/log": ["get"],
        "events": ["list"],
    }
    deployment = next(each for each in worker if each["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    policies = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(files["kubernetes/network.yaml"])}
    (rule,) = policies["agl-agent"]["egress"]
    assert policies["agl-agent"]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "agl-agent"}}
    assert rule["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "agl-server"}}}]
    assert "[kubernetes]" in files["agent.Dockerfile"]


def test_a_run_is_either_resumed_or_named(config_file: Path) -> None:
    for words, why in (
        (["--run", "bot", "--resume", "bot"], "give --run or --resume, not both"),
        (["--run", "a/b"], "expected letters, digits"),
    ):
        done = CliRunner().invoke(app, ["train", str(config_file), *words])
        assert why in str(done.exception)
