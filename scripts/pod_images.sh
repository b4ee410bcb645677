#!/usr/bin/env bash
# The images that the tests of real pods run: gateway and worker with the sim engine, sources as they are, on a base of
# our own (scripts/podman.sh). One run at a time; nothing is done if nothing has changed since the last one.
set -euo pipefail

cd "$(dirname "$0")/.."
scripts/podman.sh
exec 8>.tools/podman/images.lock
flock 8
key=$({
    cat .tools/podman/ready
    find Dockerfile .dockerignore LICENSE pyproject.toml scripts requirements app gms workers -type f -not -name '*.pyc' -print0 |
        sort --zero-terminated | xargs --null sha256sum
} | sha256sum)
if [ "$(cat .tools/podman/images 2>/dev/null)" = "$key" ]; then exit 0; fi
.venv/bin/python scripts/images.py --tool "$PWD/.tools/podman/bin/podman" --base localhost/debian:12 --engines sim --not-compiled
# What a build before this one has left without a name, and is of no use to the next.
.tools/podman/bin/podman image prune --force --filter until=24h >/dev/null
printf '%s' "$key" >.tools/podman/images
