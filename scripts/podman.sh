#!/usr/bin/env bash
# A podman of our own for the tests of real pods:  scripts/podman.sh
#
# Installs podman if it is missing, and keeps everything of ours under .tools/podman: configuration, images, containers,
# networks. .tools/podman/bin/podman is the command with all that set; a podman that is used otherwise knows nothing of it.
# The base image, localhost/debian:12, is made from the Debian mirror that apt is configured with. A second run does
# nothing. Exit code 3, and a sentence: it cannot be had here.  scripts/podman.sh --remove  takes everything away again.
set -euo pipefail

cd "$(dirname "$0")/.."
state=$PWD/.tools/podman
base=localhost/debian:12
suite=bookworm
# What an image needs of Debian (Dockerfile), and what its builder needs without a compiler.
packages=python3.11,python3.11-venv,ca-certificates
needed=(podman runc conmon netavark aardvark-dns catatonit iptables mmdebstrap)

cannot() {
    echo "podman: $1" >&2
    exit 3
}

# Not by `podman system reset`: that of 4.3 reaches beyond our folder, into what others keep in /var/lib/containers.
remove() {
    [ -d "$state" ] || return 0
    if [ -x "$state/bin/podman" ]; then
        "$state/bin/podman" pod rm --all --force --time 0 >/dev/null 2>&1 || true
        "$state/bin/podman" rm --all --force --time 0 >/dev/null 2>&1 || true
        "$state/bin/podman" network prune --force >/dev/null 2>&1 || true
    fi
    awk -v state="$state/" 'index($2, state) == 1 { print $2 }' /proc/mounts | sort --reverse | xargs --no-run-if-empty umount
    rm -rf "$state"
}

install_missing() {
    local missing=()
    for name in "${needed[@]}"; do
        dpkg --status "$name" >/dev/null 2>&1 || missing+=("$name")
    done
    [ ${#missing[@]} = 0 ] && return
    local list=/var/lib/apt/lists
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}" >/dev/null 2>&1 && return
    # Lists that are missing or old: get them, and try again where its words can be seen.
    apt-get update --quiet --quiet >/dev/null || cannot "apt-get update does not work (see above)"
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}" >/dev/null ||
        cannot "apt-get cannot install ${missing[*]} (see above)"
}

configure() {
    mkdir -p "$state/bin" "$state/networks"
    local files
    files=$(ulimit -Hn)
    cat >"$state/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=$files:$files", "nproc=4096:4096"]
log_driver = "k8s-file"
[network]
network_backend = "netavark"
network_config_dir = "$state/networks"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
static_dir = "$state/storage/libpod"
tmp_dir = "$state/run/libpod"
volume_path = "$state/storage/volumes"
CONF
    cat >"$state/storage.conf" <<CONF
[storage]
driver = "overlay"
graphroot = "$state/storage"
runroot = "$state/run"
CONF
    cat >"$state/bin/podman" <<CONF
#!/bin/sh
export CONTAINERS_CONF='$state/containers.conf' CONTAINERS_STORAGE_CONF='$state/storage.conf'
exec /usr/bin/podman "\$@"
CONF
    chmod +x "$state/bin/podman"
}

make_base() {
    local mirror=""
    # The one that apt uses for this suite, or for any other one of Debian.
    mirror=$(apt-get indextargets --format '$(SITE) $(RELEASE)' | awk -v suite="$suite" '$2 == suite { print $1; exit }')
    [ -n "$mirror" ] || cannot "apt has no mirror with Debian 12 ($suite), which the images stand on"
    # As in Debian's own images for containers: no manual pages, no translations.
    mmdebstrap --quiet --variant=apt --include="$packages" \
        --hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr --dpkgopt=force-unsafe-io \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        "$suite" - "$mirror" |
        "$state/bin/podman" import --quiet --change 'CMD ["/bin/bash"]' - "$base" >/dev/null
}

if [ "${1:-}" = --remove ]; then
    remove
    exit 0
elif [ $# -gt 0 ]; then
    echo "usage: scripts/podman.sh [--remove]" >&2
    exit 2
fi

[ "$(uname -s)" = Linux ] || cannot "pods need Linux"
[ "$(id -u)" = 0 ] || cannot "it is run by root only: containers of other users would have another network"
command -v apt-get >/dev/null || cannot "there is no apt-get here; podman is installed with it"

mkdir -p "$state"
exec 9>"$state/setup.lock"
flock 9
key=$(sha256sum scripts/podman.sh | cut -c1-64)
if [ "$(cat "$state/ready" 2>/dev/null)" = "$key $state" ]; then exit 0; fi
began=$SECONDS
install_missing
configure
"$state/bin/podman" image exists "$base" || make_base
printf '%s' "$key $state" >"$state/ready"
echo "podman: $("$state/bin/podman" --version | sed 's/^podman version //') and $base are there after $((SECONDS - began)) s"
