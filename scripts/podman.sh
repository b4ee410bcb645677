#!/usr/bin/env bash
# A podman of our own for the tests of real pods:  scripts/podman.sh
#
# Installs podman if it is missing (apt-get, as root; no package is ever removed for it), and keeps everything of ours
# under .tools/podman: configuration, images, containers, networks. .tools/podman/bin/podman is the command with all that
# set; a podman that is used otherwise knows nothing of it. The base image, localhost/debian:12, is made from the Debian
# mirror that apt is configured with. A second run does nothing. Exit code 3, and a sentence: it cannot be had here, or
# HOTSPARE_TEST_PODS=0 says that nobody wants it.
#
#   scripts/podman.sh --plan      changes nothing, and names the packages that it would install
#   scripts/podman.sh --remove    takes .tools/podman away again; packages stay
set -euo pipefail

cd "$(dirname "$0")/.."
state=$PWD/.tools/podman
lock=$PWD/.tools/podman.lock
base=localhost/debian:12
suite=bookworm
# What an image needs of Debian (Dockerfile), and what its builder needs without a compiler.
packages=python3.11,python3.11-venv,ca-certificates
needed=(podman runc conmon netavark aardvark-dns catatonit iptables mmdebstrap)

cannot() {
    echo "podman: $1" >&2
    exit 3
}

# Waits for the lock if somebody has it, and says so.
hold() {
    flock --nonblock "$1" && return
    echo "podman: waiting for another run of scripts/$2" >&2
    flock "$1"
}

# Not by `podman system reset`: that of 4.3 reaches beyond our folder, into what others keep in /var/lib/containers.
remove() {
    [ -d "$state" ] || return 0
    # Not under whoever builds in it.
    exec 8>.tools/pod_images.lock 9>"$lock"
    hold 8 pod_images.sh
    hold 9 podman.sh
    if [ -x "$state/bin/podman" ]; then
        "$state/bin/podman" pod rm --all --force --time 0 >/dev/null 2>&1 || true
        "$state/bin/podman" rm --all --force --time 0 >/dev/null 2>&1 || true
        "$state/bin/podman" network prune --force >/dev/null 2>&1 || true
    fi
    awk -v state="$state/" 'index($2, state) == 1 { print $2 }' /proc/mounts | sort --reverse | xargs --no-run-if-empty umount
    rm -rf "$state"
}

# The mirror that apt uses for the suite; empty: none.
mirror() {
    apt-get indextargets --format '$(SITE) $(RELEASE)' | awk -v suite="$suite" '$2 == suite { print $1; exit }'
}

# Everything that speaks against it, before anything is changed. Sets ``missing``, the packages to be installed.
look() {
    [ "${HOTSPARE_TEST_PODS:-1}" != 0 ] || cannot "switched off by HOTSPARE_TEST_PODS=0"
    [ "$(uname -s)" = Linux ] || cannot "pods need Linux"
    [ "$(id -u)" = 0 ] || cannot "it is run by root only: containers of other users would have another network"
    command -v apt-get >/dev/null || cannot "there is no apt-get here; podman is installed with it"
    missing=()
    local name
    for name in "${needed[@]}"; do
        dpkg --status "$name" >/dev/null 2>&1 || missing+=("$name")
    done
    [ ${#missing[@]} = 0 ] && return
    [ -n "$(mirror)" ] || cannot "apt has no mirror with Debian 12 ($suite), which the images stand on"
    # Debian's runc and the one of Docker's own packages exclude each other.
    for name in dockerd containerd; do
        command -v "$name" >/dev/null || continue
        cannot "$name is here, and gets no runc beside it unasked; for the tests of pods: apt-get install --no-remove ${missing[*]}"
    done
}

# In a session of its own: what ends us (Ctrl-C, pod_images.sh --end) must not leave dpkg half-way, so we end after it.
apt_get() {
    DEBIAN_FRONTEND=noninteractive setsid --wait apt-get -o DPkg::Lock::Timeout=300 --yes --quiet "$@" \
        >&2 </dev/null 7>&- 8>&- 9>&-
}

install_missing() {
    [ ${#missing[@]} = 0 ] && return
    echo "podman: apt-get installs ${missing[*]}"
    local ended=0
    trap 'ended=143' TERM
    trap 'ended=130' INT
    if ! apt_get install --no-remove --no-install-recommends "${missing[@]}"; then
        [ $ended = 0 ] || exit $ended
        echo "podman: once more, with new lists of packages"
        apt_get update || cannot "apt-get update does not work (see above)"
        [ $ended = 0 ] || exit $ended
        apt_get install --no-remove --no-install-recommends "${missing[@]}" ||
            cannot "apt-get cannot install ${missing[*]} without removing others, or at all (see above)"
    fi
    [ $ended = 0 ] || exit $ended
    trap - TERM INT
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
    local from
    from=$(mirror)
    [ -n "$from" ] || cannot "apt has no mirror with Debian 12 ($suite), which the images stand on"
    # As in Debian's own images for containers: no manual pages, no translations.
    mmdebstrap --quiet --variant=apt --include="$packages" \
        --hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr --dpkgopt=force-unsafe-io \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        "$suite" - "$from" |
        "$state/bin/podman" import --quiet --change 'CMD ["/bin/bash"]' - "$base" >/dev/null
}

case "${1:-}" in
'') ;;
--remove)
    remove
    exit 0
    ;;
--plan)
    look
    [ ${#missing[@]} = 0 ] || echo "${missing[*]}"
    exit 0
    ;;
*)
    echo "usage: scripts/podman.sh [--plan | --remove]" >&2
    exit 2
    ;;
esac

look
mkdir -p .tools
exec 9>"$lock"
flock 9
key=$(sha256sum scripts/podman.sh | cut -c1-64)
if [ "$(cat "$state/ready" 2>/dev/null)" = "$key $state" ]; then exit 0; fi
began=$SECONDS
look # again: it may have changed while we waited
install_missing
configure
"$state/bin/podman" image exists "$base" || make_base
printf '%s' "$key $state" >"$state/ready"
echo "podman: $("$state/bin/podman" --version | sed 's/^podman version //') and $base are there after $((SECONDS - began)) s"
