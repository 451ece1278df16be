# Image of the server (gateway, REST API, store in PostgreSQL) and of the web console. No torch, and nothing of your project.
#
#   docker build --file [[ folder ]]/server.Dockerfile --tag [[ name ]]-server .
#
# A tag and no digest: `agl deploy` asks no registry. `[[ folder ]]/pin.sh` writes today's digests into these files.
ARG PYTHON_IMAGE=[[ images.python ]]

FROM ${PYTHON_IMAGE} AS build
RUN pip install --no-cache-dir uv==[[ uv_version ]] && python -m venv /opt/venv
COPY [[ folder ]]/wheels/[[ wheel ]] /wheels/
RUN uv pip install --no-cache --python /opt/venv/bin/python "/wheels/[[ wheel ]][server,postgres,console]"

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /tmp agl
COPY --from=build /opt/venv /opt/venv
WORKDIR /tmp
ENV PATH=/opt/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
EXPOSE [[ ports.server ]] [[ ports.metrics ]]
# /readyz says whether the store answers, too. Python asks, since the image has no curl.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:[[ ports.server ]]/readyz', timeout=4)"]
CMD [[ commands.server | json ]]
