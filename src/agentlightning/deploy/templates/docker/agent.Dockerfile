# Image of the workers, which run the agent: the light core of agentlightning and the agent's own packages. No torch, no model,
# no tasks: agents get their tasks from the server. Build it in the project's folder:
#
#   docker build --file [[ folder ]]/agent.Dockerfile --tag [[ name ]]-agent .
#
# A tag and no digest: `agl deploy` asks no registry. `[[ folder ]]/pin.sh` writes today's digests into these files.
ARG PYTHON_IMAGE=[[ images.python ]]
[% if node %]
ARG NODE_IMAGE=[[ images.node ]]

# The agent is a program of Node. npm ci takes the versions of package-lock.json.
FROM ${NODE_IMAGE} AS node
WORKDIR /app
COPY package.json package-lock.json ./
RUN npm ci --omit=dev --no-audit --no-fund
[% endif %]

# Two stages: compilers, caches and uv stay behind in the first.
FROM ${PYTHON_IMAGE} AS build
RUN pip install --no-cache-dir uv==[[ uv_version ]] && python -m venv /opt/venv
WORKDIR /app
# From a wheel that you build: this package is on no public index, and `agentlightning` there is another one.
COPY [[ folder ]]/wheels/[[ wheel ]] /wheels/
RUN uv pip install --no-cache --python /opt/venv/bin/python "/wheels/[[ wheel ]][% if jobs %][kubernetes][% endif %]"
# Packages of the agent, from [[ dependencies.sentence ]]
[% if dependencies.files %]
COPY [[ dependencies.files | join(" ") ]] ./
RUN [[ dependencies.commands | join(" \\\n && ") ]]
[% endif %]

FROM ${PYTHON_IMAGE}
# Nobody needs root here: the numeric id is what Kubernetes checks (runAsNonRoot).
RUN useradd --uid 10001 --no-create-home --home-dir /tmp agl \
 && useradd --uid 10002 --no-create-home --home-dir /tmp agent
[% if node %]
COPY --from=node /usr/local/bin/node /usr/local/bin/node
COPY --from=node /app/node_modules /app/node_modules
[% endif %]
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
# The code last: it changes most. What agents must not see is left out by agent.Dockerfile.dockerignore.
COPY . .
# The root file system is mounted read-only: Python writes no bytecode, and what needs a home has it in /tmp.
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
# No health check: a worker has no port, and ends by itself (exit code 75) when an agent hangs it; its restart policy starts it again.
HEALTHCHECK NONE
# The form of a list: signals reach the worker, which drains on SIGTERM.
CMD [[ commands.worker | json ]]
