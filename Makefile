# Everything a fresh machine with Python >= 3.11 and make needs. `make demo` and `make test` install what they use into .venv.

PYTHON ?= python3
BIN := .venv/bin
TORCH := 2.13.0
UV := 0.13.9

# Where Python keeps no bytecode, every process of the tests compiles torch, transformers and the tests anew: 10 seconds of CPU each.
export PYTHONDONTWRITEBYTECODE :=

# Tests that read real data find it here where it lies beside the checkout; they are left out elsewhere.
ifneq ($(wildcard ../shared/data),)
export AGL_DATA ?= $(abspath ../shared/data)
endif

# uv looks for packages where pip does.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

.PHONY: test-environments kubernetes test-coding-agents demo model test test-fast lint bytecode test-slow test-pythons test-clients docs test-vllm test-verl test-engines test-phoenix install node-packages servers browser podman frameworks clients newest-clients clean

# Only what the demo needs is installed; `make test` adds the rest to the same .venv.
demo: .venv/.demo
	$(BIN)/agl demo $(ARGS)

.venv/.demo: requirements-demo.lock pyproject.toml
	$(check_python)
	@test -e .venv/.installed || echo "Installing torch and 92 packages into .venv: about a minute, 1.3 GB (more with CUDA). The demo then fetches a model (93 MB, once) and takes about 5 minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -e .venv/.installed || { $(call install_torch,.venv,--progress-bar on); }
	test -e .venv/.installed || { $(get_uv); $(call install,.venv,-r requirements-demo.lock); }
	$(call install,.venv,--editable .)
	$(fetch_model)
	touch $@

# The pretrained model of the demo and of tests, once for all checkouts; without it those tests are left out.
model: install
	@$(fetch_model)

# mypy keeps one core busy for minutes. Tests are compiled once, and not by each of three processes.
test: install node-packages servers model
	$(MAKE) -j 2 lint test-fast

test-fast: bytecode
	$(BIN)/pytest -m "not slow" -n 3 --dist loadfile $(ARGS)

# Only files with a slow test are collected. Each worker begins with half of them, and the one that is done first takes of the other's.
# By hand, since what they install or run takes minutes:
#   make test-vllm           vLLM (1.7 GB): the engine contract, token ids, grammars, images
#   make test-verl           verl (1.2 GB): the engine contract, chaos
#   make test-clients        SDKs' and LangChain's own suites, OpenEnv, Google's SDK, frameworks that conflict with .venv (2 GB)
#   make test-coding-agents  Claude Code, Codex, Gemini CLI, Qwen Code, opencode, llm, aider (1.4 GB)
#   make test-pythons        the light core, installed anew on each Python
#   make test-environments    OpenEnv's server (324 MB)
#   make test-kubernetes, make test-phoenix, and make test-ROOM for its tests marked `long`
test-slow: install node-packages servers browser .venv-deploy/.installed model
	$(BIN)/pytest -m "slow and not long" -n 2 --dist worksteal $$(grep -rl --include='test_*.py' mark.slow tests) $(ARGS)

# The light core on every Python we promise. A Python that is not here is left out.
test-pythons: install
	$(BIN)/pytest tests/test_pythons.py -rs $(ARGS)

# Test suites and agent frameworks that others wrote against a real gateway, each in an environment of its own.
test-clients: install node-packages frameworks clients
	$(BIN)/pytest -n 2 --dist loadfile tests/clients tests/frameworks tests/sdk/test_google_sdk.py tests/runner/test_connection_pool.py $(ARGS)

test-vllm: install .venv-vllm/.installed
	$(BIN)/pytest -m vllm $(ARGS)

test-verl: install .venv-verl/.installed
	$(BIN)/pytest tests/verl_engine $(ARGS)

# Every engine: the contract suite over each, and what each does besides. 14 minutes on two busy cores, once the environments are there.
test-engines: install .venv-vllm/.installed .venv-verl/.installed
	$(BIN)/pytest -n 2 --dist loadfile tests/engines tests/vllm_engine/test_vllm_engine.py tests/vllm_engine/test_vllm_attached.py \
		tests/verl_engine/test_verl_contract.py tests/verl_engine/test_verl_engine.py tests/end_to_end/test_open_engines.py $(ARGS)

# All tests of one folder, those too that take more minutes than CI has: `make test-trainer`.
test-%: install node-packages servers model
	$(BIN)/pytest tests/$* $(ARGS)

test-console: browser

test-kubernetes: kubernetes

# Kubernetes 1.20's API server, controller manager and scheduler, with Debian's Go: 7 CPU minutes and 3 GB, once for all checkouts.
kubernetes:
	nice tests/kubernetes/build.sh "$${XDG_CACHE_HOME:-$$HOME/.cache}/agentlightning/kubernetes-1.20.2"

# Kinds of environments whose packages run in environments of their own, and OpenEnv's own server.
test-environments: install .venv-openenv/.installed
	$(BIN)/pytest tests/environments -rs $(ARGS)

.venv-openenv/.installed: | .venv/.installed
	$(new_environment)
	{ $(BIN)/uv pip install --quiet --python $(@D)/bin/python openenv==0.10.0 || \
		$(BIN)/pip --python $(@D)/bin/python install --quiet openenv==0.10.0; } && touch $@ || \
		{ echo "OpenEnv cannot be installed here: its tests are left out"; rm -rf $(@D); }

test-phoenix: install .venv-phoenix/.installed
	$(BIN)/pytest tests/tracing/test_phoenix.py $(ARGS)

# Claude Code, Codex, Gemini CLI, Qwen Code and opencode as shipped: 1.4 GB of npm packages, about 2 minutes. Those that cannot be
# installed here are left out of the tests. npm's `ci` refuses a lock in which a package for another platform, which a registry does
# not hold, has no entry; `install` takes the versions of the lock, too.
tests/coding_agents/node_modules/.installed: tests/coding_agents/package-lock.json
	if command -v npm >/dev/null; then npm install --silent --no-save --no-audit --no-fund --prefix $(<D) && touch $@ || \
		echo "the coding agents of $< cannot be installed here: their tests are left out"; fi

test-coding-agents: install tests/coding_agents/node_modules/.installed .venv-clients-openenv/.installed .venv-frameworks-llm/.installed .venv-frameworks-aider/.installed
	$(BIN)/pytest -m slow tests/coding_agents -rs $(ARGS)

# The npm packages of OpenAI, Anthropic and OpenTelemetry, for the tests that run them; without npm those tests are left out.
node-packages: tests/sdk/node/node_modules/.installed tests/runner/node/node_modules/.installed

# Debian's Chromium and axe-core, for the tests of the console in a browser; where either cannot be had they are left out.
browser: tests/console/node/node_modules/.installed
	@missing="chromium"; \
	! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null || missing=""; \
	$(install_missing)

%/node_modules/.installed: %/package-lock.json
	if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --prefix $* && touch $@; fi

# PostgreSQL, Redis and bubblewrap, which the tests start for themselves: what is installed, else Debian's packages (RUNLEVEL=1 starts no
# service). Where neither can be, the tests that need them are left out and say so.
servers:
	@missing=""; \
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || command -v postgres >/dev/null || missing="postgresql"; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	[ "$$(uname)" != Linux ] || command -v bwrap >/dev/null || missing="$$missing bubblewrap"; \
	$(install_missing)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bytecode: install
	@found=$$($(BIN)/pytest --collect-only -qq 2>&1) || { echo "$$found" | tail -n 40; false; }

install: .venv/.installed

# Debian's packages in $missing, if any (RUNLEVEL=1 starts no service).
define install_missing
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ]; then root="env"; else root="sudo -n env"; fi; \
		install="$$root DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq"; \
		{ command -v apt-get >/dev/null && $$install update && $$install install --no-install-recommends $$missing; } \
			>/dev/null || echo "$$missing cannot be installed here: the tests that need it are left out"; \
	fi
endef

define fetch_model
	$(BIN)/python -m agentlightning.demo.pretrained >/dev/null || echo "without it the demo trains a tiny model, and tests of it are left out"
endef

define check_python
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
endef

# $(1): the environment; $(2): options of pip, by default --quiet. Compiling what nobody may import takes longer than its download.
define install_torch
	{ [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null && \
		$(BIN)/uv pip install --quiet --python $(1)/bin/python "torch==$(TORCH)+cpu" 2>/dev/null; } || { $(call pip_torch,$(1),$(2)); }
endef

define pip_torch
	pip="$(BIN)/pip --python $(1)/bin/python --disable-pip-version-check install --no-compile $(or $(2),--quiet)"; \
	if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		$$pip "torch==$(TORCH)+cpu" 2>/dev/null || $$pip "torch==$(TORCH)+cpu" --extra-index-url https://download.pytorch.org/whl/cpu; \
	else \
		$$pip "torch==$(TORCH)"; \
	fi
endef

# uv takes seconds where pip takes minutes. Where it cannot be had, or finds none of the places that pip is configured for, pip does it.
define get_uv
	test -x $(BIN)/uv || $(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV) || echo "uv cannot be installed here: pip takes longer"
endef

# The environment of a target, made anew and without pip of its own.
define new_environment
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
endef

# $(1): the environment; $(2): what to install into it, without what that asks for: a lock file lists all.
define install
	$(BIN)/uv pip install --quiet --no-deps --python $(1)/bin/python $(2) 2>/dev/null || \
		$(BIN)/pip --python $(1)/bin/python --disable-pip-version-check install --quiet --no-compile --no-deps $(2)
endef

# torch goes first and alone: on Linux without a GPU it has to be a CPU build, where anything else that asks for torch would
# pull gigabytes of CUDA packages. A CPU build that pip finds by itself is taken, else PyTorch's own CPU index is asked.
.venv/.installed: requirements.lock pyproject.toml
	$(check_python)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(get_uv)
	$(call install_torch,.venv)
	$(call install,.venv,-r requirements.lock)
	$(call install,.venv,--editable .)
	touch $@

# vLLM conflicts with half of what stands in .venv. On a machine that cannot have it, its tests are left out.
.venv-vllm/.installed: tests/vllm_engine/vllm.lock tests/vllm_engine/cpu_torchvision/sitecustomize.py | .venv/.installed
	$(new_environment)
	$(call install_torch,$(@D))
	{ $(call install,$(@D),-r $<); } && cp $(word 2,$^) $(@D)/lib/python3*/site-packages/ && touch $@ || \
		{ echo "vLLM cannot be installed here: its tests are left out"; rm -rf .venv-vllm; }

# verl has versions of its own of transformers and others. Its processes import this package, too.
.venv-verl/.installed: tests/verl_engine/verl.lock | .venv/.installed
	$(new_environment)
	$(call install_torch,$(@D))
	{ $(call install,$(@D),-r $< --editable .); } && touch $@ || \
		{ echo "verl cannot be installed here: its tests are left out"; rm -rf .venv-verl; }

# Validators of Dockerfiles, scripts, charts and Kubernetes objects, for the tests of `agl deploy`.
.venv-deploy/.installed: tests/deploy/validators.lock | .venv/.installed
	$(new_environment)
	{ $(call install,$(@D),-r $<); } && touch $@ || \
		{ echo "the validators of $< cannot be installed here: their tests are left out"; rm -rf $(@D); }

# Podman builds the images of `agl deploy` from a root of Debian's packages: bases of registries cannot be had everywhere.
podman:
	@missing=""; \
	for name in podman runc mmdebstrap; do command -v $$name >/dev/null || missing="$$missing $$name"; done; \
	$(install_missing)

test-deploy: .venv-deploy/.installed podman

# Phoenix, a real viewer of traces, for `make test-phoenix`.
.venv-phoenix/.installed: tests/tracing/phoenix.lock | .venv/.installed
	$(new_environment)
	$(call install,$(@D),-r $<)
	touch $@

# The documentation site, from a copy laid out as the repository is; a link that leads nowhere ends it. Open site/index.html.
docs: .venv-docs/.installed
	rm -rf build/docs && mkdir -p build/docs
	tar cf - *.md LICENSE docs examples/*.* examples/*/*.md | tar xf - -C build/docs
	.venv-docs/bin/zensical build --strict --config-file zensical.toml

.venv-docs/.installed: docs/site.lock | .venv/.installed
	$(new_environment)
	$(call install,$(@D),-r $<)
	touch $@

# Agent frameworks that conflict over versions of a package, for the tests of their pages in docs/agents: an environment for each
# conflict. Where one cannot be installed, its tests are left out.
frameworks: .venv-frameworks-google/.installed .venv-frameworks-openai2/.installed .venv-frameworks-openai3/.installed .venv-frameworks-crewai/.installed

.venv-frameworks-%/.installed: tests/frameworks/%.lock | .venv/.installed
	$(new_environment)
	{ $(call install,$(@D),-r $<); } && touch $@ || \
		{ echo "the agent frameworks of $< cannot be installed here: their tests are left out"; rm -rf $(@D); }

# Clients of the tests in tests/clients, and frameworks whose pages only `make test-clients` runs: an environment for each conflict over
# versions.
clients: .venv-clients-langchain/.installed .venv-clients-sdks/.unpacked .venv-clients-verifiers/.installed \
	.venv-clients-vendors/.installed .venv-clients-openenv/.installed .venv-frameworks-agents/.installed .venv-frameworks-kernel/.installed tests/frameworks/node/node_modules/.installed

.venv-clients-%/.installed: tests/clients/%.lock | .venv/.installed
	$(new_environment)
	{ $(call install,$(@D),-r $<); } && touch $@ || \
		{ echo "the clients of $< cannot be installed here: their tests are left out"; rm -rf $(@D); }

# The source distributions of the pinned SDKs, which hold their tests.
.venv-clients-sdks/.unpacked: .venv-clients-sdks/.installed
	test ! -e $< || { $(BIN)/pip --python $(@D)/bin/python download --quiet --disable-pip-version-check --no-binary :all: --no-deps --no-build-isolation \
		--dest $(@D)/sources $$(grep -E '^(openai|anthropic)==' tests/clients/sdks.lock) && \
		for each in $(@D)/sources/*.tar.gz; do tar xzf $$each -C $(@D)/sources; done && touch $@; }

# Moves the pins of these to the newest versions that fit together, and prints what changed; then: make test-clients. A lock of one
# package is installed without what that asks for.
newest-clients: frameworks clients .venv-frameworks-llm/.installed
	for lock in tests/clients/*.lock tests/frameworks/*.lock; do \
		python=.venv-$$(basename $$(dirname $$lock))-$$(basename $$lock .lock)/bin/python; test -x $$python || continue; \
		$(BIN)/uv pip tree --depth 0 --python $$python 2>/dev/null | sed 's/ v.*//' > $$lock.in && \
			$(BIN)/uv pip compile --quiet --no-annotate --no-header $$(test $$(grep -c == $$lock) -gt 1 || echo --no-deps) \
				--python $$python --output-file $$lock.new $$lock.in && \
			{ grep '^#' $$lock; cat $$lock.new; } > $$lock.in && mv $$lock.in $$lock; rm -f $$lock.in $$lock.new; done
	for folder in tests/sdk/node tests/frameworks/node tests/coding_agents; do (cd $$folder && npm install --package-lock-only --save-exact \
		$$(node -p 'Object.keys(require("./package.json").dependencies).map(name => name + "@latest").join(" ")')); done
	@git diff --unified=0 -- 'tests/*.lock' 'tests/*/package.json' | grep -E '^[-+] *["a-z]' || echo "the pins are the newest versions"

clean:
	rm -rf site build .venv .venv-openenv .venv-vllm .venv-verl .venv-frameworks-* .venv-clients-* .venv-litellm .venv-phoenix .venv-docs .venv-deploy .venv-agentlightning-v03 .venv-agentops .venv-trl tests/sdk/node/node_modules tests/runner/node/node_modules tests/frameworks/node/node_modules tests/coding_agents/node_modules tests/console/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
