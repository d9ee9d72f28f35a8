#!/usr/bin/env bash
# Takes the cluster of up.sh down; the emulated GPUs go with its node.
set -euo pipefail
exec kind delete cluster --name kerf
