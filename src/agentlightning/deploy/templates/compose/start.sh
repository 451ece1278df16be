#!/usr/bin/env bash
# Makes what is missing (secrets, images, tokens) and starts everything. Run it again at any time: what is there stays.
set -euo pipefail
cd "$(dirname "$0")"

run=[[ name ]]
server=http://127.0.0.1:[[ ports.server ]]

secret() { # NAME: adds a random value to .env where there is none
    grep -q "^$1=" .env || echo "$1=$(openssl rand -hex 24)" >>.env
}

token() { # NAME ROLE [OPTION…]: adds a token of the server to .env where there is none; fails until the run exists
    local made
    if grep -q "^$1=." .env; then return; fi
    made=$(docker compose exec -T server agl tokens create --role "$2" "${@:3}" --server "$server" 2>/dev/null) || return 1
    echo "$1=$made" >>.env
}

test -e wheels/[[ wheel ]] || {
    echo "wheels/[[ wheel ]] is missing; make it from a checkout of agentlightning:" >&2
    echo "  pip wheel --no-deps --wheel-dir $PWD/wheels PATH-OF-THE-CHECKOUT" >&2
    exit 2
}

umask 077
touch .env
for name in POSTGRES_PASSWORD AGL_SERVER_KEY [[ sampler_key ]]; do
    secret "$name"
done
[% for variable in asked_keys %]
grep -q "^[[ variable ]]=." .env || echo "note: [[ variable ]] is not in .env; whoever needs that key has none" >&2
[% endfor %]

docker compose build
docker compose up --detach --wait postgres server
token TRAINER_TOKEN trainer
token READER_TOKEN reader
docker compose up --detach trainer[% if vllm %] vllm[% endif %]

# The trainer makes the run once its engine is up: minutes, where a model is downloaded.
for _ in $(seq 360); do
    if token WORKER_TOKEN worker --run "$run"; then break; fi
    sleep 5
done
grep -q '^WORKER_TOKEN=.' .env || {
    echo "run $run is not there after half an hour; see: docker compose logs trainer" >&2
    exit 1
}
docker compose up --detach
echo "console http://127.0.0.1:[[ ports.console ]] (key: READER_TOKEN in .env)"
