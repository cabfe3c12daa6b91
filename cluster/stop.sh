#!/usr/bin/env bash
# Stops what run_all.sh and head.sh started on this machine; a running job saves a checkpoint first.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
run_module stop
