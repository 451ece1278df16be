"""The package that runs inside a vLLM server, in vLLM's Python environment, where agentlightning is not installed.

`python -m agentlightning_vllm` starts a server on a socket of its parent's; `guard` keeps its weights from others; `worker`
loads them, which `fetch` brings.
"""
