#!/usr/bin/env bash
# Joins this machine to the cluster of a head and stays in the foreground; SIGTERM drains it as a preemption.
#   bash cluster/worker.sh HEAD_IP:PORT TOKEN_FILE     (a copy of the head's .cluster/token, mode 0600)
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
ensure_installed
run_module worker "$@"
