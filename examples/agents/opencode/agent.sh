#!/usr/bin/env bash
# An agent of opencode as it is trained. Install it, then train it:
#   npm install opencode-ai@1.18.33
#   agl train --agent "bash agent.sh" --tasks tasks.jsonl --model Qwen/Qwen2.5-Coder-1.5B-Instruct
set -euo pipefail
opencode=$PWD/node_modules/.bin/opencode
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$AGL_TASK" "$1"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/home" "$work/repository"
export HOME=$work/home
cd "$work/repository"
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1
cat > "$work/opencode.json" <<EOF
{
  "model": "agl/$AGL_MODEL", "share": "disabled", "permission": {"bash": "allow", "edit": "allow"},
  "provider": {"agl": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"$AGL_MODEL": {"name": "agl", "tool_call": true, "limit": {"context": 32000, "output": 4000}}}
  }}
}
EOF
export OPENCODE_CONFIG=$work/opencode.json

"$opencode" run --title rollout "$(field issue)" >&2

if bash -c "$(field check)"; then echo '{"reward": 1}'; else echo '{"reward": 0}'; fi
