#!/usr/bin/env bash
# An agent of aider as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install aider-chat==0.86.2
#   agl train --agent "bash agent.sh" --tasks tasks.jsonl --model Qwen/Qwen2.5-Coder-1.5B-Instruct
set -euo pipefail
aider=$PWD/agent-venv/bin/aider
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$AGL_TASK" "$1"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/repository"
export HOME=$work/home
cd "$work/repository"
git init --quiet
field code > ages.py
echo "{\"openai/$AGL_MODEL\": {\"max_input_tokens\": 32000, \"max_output_tokens\": 4000}}" > "$work/model.json"

"$aider" --message "$(field issue)" ages.py --model "openai/$AGL_MODEL" --model-metadata-file "$work/model.json" --edit-format diff \
  --yes-always --no-auto-commits --no-check-update --analytics-disable --no-show-model-warnings | tee "$work/output" >&2
if grep -qE '^litellm\.\w+Error' "$work/output"; then exit 1; fi  # aider itself ends with 0 where the server is away

if python3 -c "$(field check)"; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
