#!/usr/bin/env bash
# The images that the tests of real pods run: gateway and worker with the sim engine, sources as they are, on a base of
# our own (scripts/podman.sh). One run at a time; nothing is done if nothing has changed since the last one.
#
#   scripts/pod_images.sh                makes them
#   scripts/pod_images.sh --begin PID    begins to, in the background, and ends when that process (make) does; says which
#                                        packages it installs, and where its log is
#   scripts/pod_images.sh --end          ends what --begin began, at once; only apt-get may finish first
set -euo pipefail

cd "$(dirname "$0")/.."
log=.tools/pod_images.log
# Locked as long as the background job lives, with its pid, which is its process group's, too.
job=.tools/pod_images.job

begin() {
    mkdir -p .tools
    exec 7>>"$job"
    flock --nonblock 7 || return 0 # it runs
    local missing
    if ! missing=$(scripts/podman.sh --plan); then
        echo "podman: so the tests of real pods will be skipped" >&2
        return 0
    fi
    if [ -n "$missing" ]; then
        echo "podman: for the tests of real pods apt-get installs $missing, in the background (log: $log);" \
            "HOTSPARE_TEST_PODS=0 leaves them out and installs nothing"
    fi
    setsid scripts/pod_images.sh >"$log" 2>&1 &
    echo $! >"$job"
    setsid scripts/pod_images.sh --watch "$1" $! >/dev/null 2>&1 7>&- &
}

# Ends the job when the first process has ended before it.
watch() {
    while [ -d "/proc/$1" ]; do
        [ -d "/proc/$2" ] || return 0
        sleep 1
    done
    end
}

end() {
    [ -e "$job" ] || return 0
    exec 7<"$job"
    flock --nonblock 7 && return
    kill_job
    flock --timeout 1 7 && return
    echo "podman: waiting for what runs in the background (log: $log)" >&2
    # Again and again: it may just have been about to begin.
    until flock --timeout 1 7; do kill_job; done
}

# Looks first whether that pid is still the job's.
kill_job() {
    local pid words=()
    pid=$(cat "$job")
    { mapfile -d '' -t words <"/proc/$pid/cmdline"; } 2>/dev/null || return 0
    if [ "${words[1]:-}" = scripts/pod_images.sh ] && [ "/proc/$pid/cwd" -ef . ]; then
        kill -TERM -- "-$pid" 2>/dev/null || true
    fi
}

case "${1:-}" in
'') ;;
--begin)
    begin "${2:?the process to end with}"
    exit 0
    ;;
--watch)
    watch "$2" "$3"
    exit 0
    ;;
--end)
    end
    exit 0
    ;;
*)
    echo "usage: scripts/pod_images.sh [--begin PID | --end]" >&2
    exit 2
    ;;
esac

podman=.tools/podman/bin/podman

# Containers of a build that was ended: podman knows them by their storage only.
drop_leftovers() {
    "$podman" ps --all --external --format '{{.ID}} {{.Status}}' | awk '$2 == "Storage" { print $1 }' |
        xargs --no-run-if-empty "$podman" rm --force >/dev/null
}

# Ends after whom it has started, which get the signal, too.
trap 'exit 143' TERM
scripts/podman.sh
exec 8>.tools/pod_images.lock
flock 8
key=$({
    cat .tools/podman/ready
    find Dockerfile .dockerignore LICENSE pyproject.toml scripts requirements app gms workers -type f -not -name '*.pyc' -print0 |
        sort --zero-terminated | xargs --null sha256sum
} | sha256sum)
if [ "$(cat .tools/podman/images 2>/dev/null)" = "$key" ]; then exit 0; fi
# From here on the images are neither the old ones nor the new ones.
rm -f .tools/podman/images
trap 'drop_leftovers; exit 143' TERM
drop_leftovers
.venv/bin/python scripts/images.py --tool "$PWD/$podman" --base localhost/debian:12 --engines sim --not-compiled
# What a build before this one has left without a name, and is of no use to the next.
"$podman" image prune --force --filter until=24h >/dev/null
printf '%s' "$key" >.tools/podman/images
