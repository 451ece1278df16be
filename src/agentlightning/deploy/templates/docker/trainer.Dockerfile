# Image of the trainer, with its engine: torch for CUDA. The project's tasks and code are in it[% if model %], and so is the model in
# [[ model ]][% endif %].
#
#   docker build --file [[ folder ]]/trainer.Dockerfile --tag [[ name ]]-trainer .
#
# The base is plain Python and not nvidia/cuda: torch's wheels bring the CUDA libraries, and the host's container toolkit brings the
# driver, as NVIDIA_DRIVER_CAPABILITIES asks for. A tag and no digest: `[[ folder ]]/pin.sh` writes today's digests into these files.
ARG PYTHON_IMAGE=[[ images.python ]]

FROM ${PYTHON_IMAGE} AS build
RUN pip install --no-cache-dir uv==[[ uv_version ]] && python -m venv /opt/venv
WORKDIR /app
COPY [[ folder ]]/wheels/[[ wheel ]] /wheels/
RUN uv pip install --no-cache --python /opt/venv/bin/python "/wheels/[[ wheel ]][[ "[" ~ extras ~ "]" ]]"
# Reward functions and tasks may import what the agent does: [[ dependencies.sentence ]]
[% if dependencies.files %]
COPY [[ dependencies.files | join(" ") ]] ./
RUN [[ dependencies.commands | join(" \\\n && ") ]]
[% endif %]

FROM ${PYTHON_IMAGE}
# /runs (checkpoints, metrics) and /models (what is downloaded from a hub) are volumes, which take the owner of these folders.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp agl \
 && mkdir /runs /models && chown 10001:10001 /runs /models
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY . .
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp HF_HOME=/models \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
# No health check: the trainer watches its own processes and ends where they cannot go on; started again, it resumes the run.
HEALTHCHECK NONE
CMD [[ commands.trainer | json ]]
