#!/usr/bin/env bash
# Start the ranks of this host: start_node.sh PROGRAM [ARGUMENT...], on every host at the same time.
#
# Kubernetes (an indexed job) and Slurm say which host this is; elsewhere set NODE (0, 1, ...) and NODES.
#   FIRST_HOST   name or address of host 0, which all hosts must reach
#   RANKS        ranks of each host (default: 4)
#   MASTER_PORT  port of host 0 at which ranks meet (default: 29500)
#   PYTHON       the interpreter (default: python)
# deep_ep's own variables pass through: `python -m deep_ep doctor --env` lists them.
set -euo pipefail

node=${NODE:-${JOB_COMPLETION_INDEX:-${SLURM_NODEID:-}}}
nodes=${NODES:-${SLURM_NNODES:-}}
: "${node:?set NODE, the number of this host}"
: "${nodes:?set NODES, the number of hosts}"
: "${FIRST_HOST:?set FIRST_HOST, the name or address of host 0}"
: "${1:?name the program that all ranks run}"

# Ranks of a host are consecutive and equally many on every host, which deep_ep needs.
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "${RANKS:-4}" \
    --node-rank "$node" --master-addr "$FIRST_HOST" --master-port "${MASTER_PORT:-29500}" "$@"
