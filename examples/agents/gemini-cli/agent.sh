#!/usr/bin/env bash
# An agent of Gemini CLI as it is trained. Install it, then train it:
#   npm install @google/gemini-cli@0.61.0
#   agl train --agent "bash agent.sh" --tasks tasks.jsonl --model Qwen/Qwen2.5-Coder-1.5B-Instruct --set agent.unsupported_params=drop
set -euo pipefail
gemini=$PWD/node_modules/.bin/gemini
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$AGL_TASK" "$1"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/repository"
export HOME=$work/home
cd "$work/repository"
export GEMINI_CLI_TRUST_WORKSPACE=true
mkdir "$HOME/.gemini"
echo '{"security": {"auth": {"selectedType": "gemini-api-key"}}}' > "$HOME/.gemini/settings.json"

"$gemini" --yolo -p "$(field issue)" -m "$AGL_MODEL" >&2

if bash -c "$(field check)"; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
