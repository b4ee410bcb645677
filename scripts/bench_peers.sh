#!/usr/bin/env bash
# The gateways that `hotspare bench gateway` measures beside ours: the routers from PyPI, each in a virtual environment of
# its own under .peers/, at the versions that docs/benchmarks.md speaks of; nginx from the distribution.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

# $1: name, $2: version
router() {
    local folder=.peers/$1
    if compgen -G "$folder/lib/python*/site-packages/${1//-/_}-$2.dist-info" >/dev/null; then
        echo "bench-peers: $1 $2 is there"
        return
    fi
    "$python" -m venv --clear "$folder"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet "$1==$2"
    echo "bench-peers: $1 $2 installed"
}

router vllm-router 0.1.17
router sglang-router 0.3.2

if PATH=$PATH:/usr/sbin command -v nginx >/dev/null; then
    echo "bench-peers: nginx is there"
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # RUNLEVEL=1: installed, and not started as a service.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends nginx-light
    echo "bench-peers: nginx installed"
else
    echo "bench-peers: nginx is missing; install it (Debian, Ubuntu): sudo apt-get install nginx-light" >&2
fi
