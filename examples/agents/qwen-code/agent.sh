#!/usr/bin/env bash
# An agent of Qwen Code as it is trained. Install it, then train it:
#   npm install @qwen-code/qwen-code@0.24.4
#   agl train --agent "bash agent.sh" --tasks tasks.jsonl --model Qwen/Qwen2.5-Coder-1.5B-Instruct
set -euo pipefail
qwen=$PWD/node_modules/.bin/qwen
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$AGL_TASK" "$1"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/repository"
export HOME=$work/home
cd "$work/repository"
export OPENAI_MODEL=$AGL_MODEL
mkdir "$HOME/.qwen"
echo '{"memory": {"enableManagedAutoMemory": false, "enableManagedAutoDream": false}}' > "$HOME/.qwen/settings.json"

"$qwen" --auth-type openai --yolo -p "$(field issue)" >&2

if bash -c "$(field check)"; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
