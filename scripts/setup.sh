#!/usr/bin/env bash
# Make or refresh .venv:  scripts/setup.sh [--test]
#
# When nothing that decides about .venv has changed since the last time, this ends here in a few milliseconds,
# without starting Python. Otherwise scripts/setup_venv.py does the work.
set -euo pipefail

cd "$(dirname "$0")/.."
root=$PWD

groups="core vllm"
if [ "${1:-}" = "--test" ]; then
    groups="core vllm opentelemetry load test"
elif [ $# -gt 0 ]; then
    echo "usage: scripts/setup.sh [--test]" >&2
    exit 2
fi

# Everything that decides what is in .venv, and the place itself: scripts in .venv/bin name it.
inputs=(requirements/*.txt pyproject.toml scripts/setup.sh scripts/setup_venv.py scripts/pip_settings.py)
key=$({ sha256sum "${inputs[@]}"; echo "$root"; } | sha256sum | cut -c1-64)

stamp=.venv/.hotspare-setup
if [ -x .venv/bin/python ] && [ -r "$stamp" ]; then
    read -r had_key had_python had_groups <"$stamp" || true
    if [ "$had_key $had_python" = "$key $(readlink -f .venv/bin/python)" ]; then
        case " $had_groups " in
        *" $groups "*) exit 0 ;;
        esac
    fi
fi

# The locks are for CPython 3.11 (torch's CPU wheel is locked for that one alone), so it is preferred where there
# are several. PYTHON names another interpreter.
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3; do
        if "$candidate" -c "" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "setup: there is no python3 on this machine. Install Python 3.11 (Debian, Ubuntu: python3, python3-venv)." >&2
    exit 1
fi
# shellcheck disable=SC2086  # the groups are words
exec "$python" scripts/setup_venv.py "$key" $groups
