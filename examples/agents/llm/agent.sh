#!/usr/bin/env bash
# An agent of llm as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install llm==0.36
#   agl train --agent "bash agent.sh" --tasks tasks.jsonl --model Qwen/Qwen2.5-Coder-1.5B-Instruct
set -euo pipefail
llm=$PWD/agent-venv/bin/llm
tools=$PWD/tools.py
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$AGL_TASK" "$1"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/repository"
export LLM_USER_PATH=$work/home
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<EOF
- model_id: agl
  model_name: $AGL_MODEL
  api_base: $OPENAI_BASE_URL
  api_key_name: openai
  supports_tools: true
  supports_schema: true
EOF
cd "$work/repository"

"$llm" --model agl --functions "$tools" --chain-limit 20 "$(field issue)" >&2 2> "$work/errors" || {
  cat "$work/errors" >&2
  grep -qE 'Chain limit|\(char [0-9]+\)$' "$work/errors"  # mistakes of the model; anything else fails the attempt
}

if bash -c "$(field check)"; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
