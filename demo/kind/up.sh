#!/usr/bin/env bash
# Brings up a cluster of kind with emulated GPUs and kerf on it.
#
#   demo/kind/up.sh [GPU…]      default: h100-80 h100-80 a100-40:mig=on a30:mig=on
#
# Needs docker, kind 0.30 or newer, kubectl, helm, and Rust for what is built.
# KIND_NODE_IMAGE names another image of the node (Kubernetes 1.36 or newer).
set -euo pipefail
cd "$(dirname "$0")/../.."

name=kerf
node="$name-control-plane"
emulator=/var/lib/nvidia-emulator

for tool in docker kind kubectl helm cargo; do
    if ! command -v "$tool" >/dev/null; then
        echo "up.sh: there is no \`$tool\` on the PATH; install it first (\`cargo xtask demo\` needs no docker and no kind)" >&2
        exit 1
    fi
done
if kind get clusters 2>/dev/null | grep --quiet --line-regexp "$name"; then
    echo "up.sh: the cluster \`$name\` is there already; take it down with demo/kind/down.sh" >&2
    exit 1
fi
gpus=("$@")
if [ "${#gpus[@]}" -eq 0 ]; then
    gpus=(h100-80 h100-80 a100-40:mig=on a30:mig=on)
fi

cargo build --release --package kerf-emulator
cargo xtask image

create=(kind create cluster --config demo/kind/kind.yaml --wait 3m)
if [ -n "${KIND_NODE_IMAGE:-}" ]; then
    create+=(--image "$KIND_NODE_IMAGE")
fi
"${create[@]}"

# The emulated machine is a folder of the node. Its programs and its library are
# built here: the node's C library must not be older than this machine's.
for file in nvidia-emulator nvidia-smi libkerf_emulator.so; do
    docker cp "target/release/$file" "$node:/usr/local/lib/$file"
done
init=(/usr/local/lib/nvidia-emulator init --root "$emulator")
for gpu in "${gpus[@]}"; do
    init+=(--gpu "$gpu")
done
docker exec "$node" "${init[@]}"

for image in kerf cuda-stub; do
    kind load image-archive --name "$name" "target/images/$image.tar"
done
helm upgrade --install kerf charts/kerf --kube-context "kind-$name" --namespace kerf --create-namespace \
    --values demo/kind/values.yaml --wait --timeout 3m

cat <<TEXT

kerf runs on the cluster kind-$name. The stories of demo/, for example:

  kubectl --context kind-$name apply -f demo/mig-on-demand
  kubectl --context kind-$name exec --namespace kerf daemonset/kerf-node -- kerf status

Take it down with demo/kind/down.sh.
TEXT
