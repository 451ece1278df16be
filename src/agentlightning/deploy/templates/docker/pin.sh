#!/usr/bin/env bash
# Writes the digests of today's base images into the Dockerfiles, so that a build tomorrow has the same bases. Needs docker buildx and
# the network. Do it again, and look at the difference, to take security updates of the bases.
set -euo pipefail
cd "$(dirname "$0")"

for file in *.Dockerfile; do
    while IFS='=' read -r variable image; do
        plain="${image%@*}"
        digest=$(docker buildx imagetools inspect "$plain" --format '{{.Manifest.Digest}}')
        sed -i.before "s|^ARG ${variable}=.*|ARG ${variable}=${plain}@${digest}|" "$file"
        rm -f "$file.before"
        echo "$file: $plain@$digest"
    done < <(sed -n 's/^ARG \([A-Z_]*_IMAGE\)=/\1=/p' "$file")
done
