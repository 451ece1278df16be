# vLLM with the part of agentlightning that runs inside of it and takes new weights from the trainer. The version is the one that
# agentlightning was tested with, in its CPU build; no test ran this image.
#
#   docker build --file [[ folder ]]/vllm.Dockerfile --tag [[ name ]]-vllm .
ARG VLLM_IMAGE=[[ images.vllm ]]
ARG PYTHON_IMAGE=[[ images.python ]]

FROM ${PYTHON_IMAGE} AS build
COPY [[ folder ]]/wheels/[[ wheel ]] /wheels/
RUN python -m zipfile -e /wheels/[[ wheel ]] /unpacked

FROM ${VLLM_IMAGE}
COPY --from=build /unpacked/agentlightning/engines/vllm/vllm_side /opt/agentlightning
[% if model %]
COPY [[ model ]] /app/[[ model ]]
[% endif %]
# Routes for weights exist in this mode alone: the network policy, or Compose's inner network, keeps agents from the port.
ENV PYTHONPATH=/opt/agentlightning VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 HF_HOME=/models HOME=/tmp
RUN mkdir -p /models && chown 10001:10001 /models
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=6 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:[[ ports.vllm ]]/health', timeout=4)"]
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]
CMD [[ commands.vllm | json ]]
