#!/usr/bin/env bash
# An agent of mini-swe-agent as it is trained. Install it, then train it:
#   python -m venv agent-venv && agent-venv/bin/pip install mini-swe-agent "litellm[mcp]"
#   agl train --agent "bash agent.sh" --tasks tasks.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
set -euo pipefail
mini=$PWD/agent-venv/bin/mini
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=true

field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$AGL_TASK" "$1"; }

repository=$(mktemp -d)
trap 'rm -rf "$repository"' EXIT
cd "$repository"
git init --quiet
field code > ages.py

"$mini" --model "openai/$AGL_MODEL" --task "$(field issue)" --yolo --exit-immediately \
  --config mini.yaml --config agent.step_limit=10 --output .git/trajectory.json

if python3 -c "$(field check)"; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
