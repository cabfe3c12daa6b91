#!/usr/bin/env bash
# The whole job: set-up, training, serving, one generated text.
#   bash cluster/run_all.sh [CONFIG] [KEY=VALUE …]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
ensure_installed
run_module run_all "$@"
