#!/bin/bash
#SBATCH --job-name=bytelm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300

# Trains a language model on 2 nodes with 8 GPUs each, one rank per GPU:
#
#   sbatch examples/slurm.sh             in a clone that all nodes see, installed into its .venv
#   sbatch examples/slurm.sh --resume    goes on where a job ended
#
# Five minutes before its time is up, Slurm sends SIGUSR1 to this shell, which mpiexec has become by then: mpiexec passes
# it on, and the ranks end after the same step, with a checkpoint. An mpiexec that knows Slurm finds the nodes itself, as
# MPICH's and Open MPI's do. With the cluster's own MPI, "srun --mpi=pmix python -m mpi4py ..." does as well (or pmi2:
# "srun --mpi=list" says what there is); then the signal is --signal=USR1@300, without the B, as srun's are the ranks.

# All ranks of a node see all of its GPUs (--gpus-per-node, not --gpus-per-task), because they read each other's memory.

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch}"
export PATH="$PWD/.venv/bin:$PATH"
exec mpiexec -n "$SLURM_NTASKS" python -m mpi4py examples/bytelm/train.py --size base --checkpoint runs/base "$@"
