#!/usr/bin/env bash
# Starts a Ray head on this machine, or joins the one that runs. Loopback only, unless NODE_IP says otherwise:
#   NODE_IP=10.0.0.5 bash cluster/head.sh     lets cluster/worker.sh on other machines join
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
ensure_installed
run_module services
