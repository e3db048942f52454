#!/usr/bin/env bash
# A dress rehearsal of examples/slurm/pretrain_llama_7b.sbatch without a cluster and without GPUs: a
# slurmctld and two slurmd on this host, two nodes of one process each, gloo.
#
#   sudo bash tests/rehearsal/slurm.sh [FOLDER for what they write]
#
# A job trains; a TERM, as Slurm sends before the limit, makes it write a checkpoint and end; a second
# job goes on where it stopped. The sbatch file runs as it is: what is smaller is given on sbatch's
# command line and by a wrapper in place of its Python, which appends flags for a tiny model.
#
# Needs root, and of Debian: apt-get install slurm-wlm munge. Takes two to five minutes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
patience=${PATIENCE:-300} # seconds for each of: first iterations, end after TERM, second job
stop_behind=3             # iterations of the first job before it is told to end
iters=10                  # of both jobs together
sbatch_file=${SBATCH_FILE:-$root/examples/slurm/pretrain_llama_7b.sbatch}

fail() {
    printf 'slurm rehearsal: %s\n' "$*" >&2
    tail -n 40 "$folder"/*.log >&2 2>/dev/null || true
    exit 1
}
refuse() {
    printf 'slurm rehearsal: %s\n' "$*" >&2
    exit 2
}

PATH=$PATH:${SBIN-/usr/sbin} # where Debian's daemons are, and a user's shell does not look
for tool in munged slurmctld slurmd sbatch srun scancel squeue sinfo scontrol; do
    command -v "$tool" >/dev/null || refuse "$tool is missing: apt-get install slurm-wlm munge"
done
((EUID == 0)) || refuse "needs root: slurmd starts the tasks of whoever submits a job"

# ------------------------------------------------------------------ a cluster of one host

folder=${1:-$(mktemp -d "${TMPDIR:-/tmp}/epp-slurm-XXXXXX")}
mkdir -p "$folder"/{state,spool-node0,spool-node1}
# munged wants its folders closed to others.
munge=$(mktemp -d /run/epp-munge-XXXXXX)
chmod 0755 "$munge"
dd if=/dev/urandom of="$munge/key" bs=1024 count=1 status=none
chmod 0400 "$munge/key"
host=$(hostname -s)
port=$((30000 + RANDOM % 20000))
export SLURM_CONF=$folder/slurm.conf
cat >"$SLURM_CONF" <<EOF
ClusterName=rehearsal
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
NodeName=node0 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=1 State=UNKNOWN
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=1 State=UNKNOWN
PartitionName=all Nodes=node0,node1 Default=YES MaxTime=INFINITE State=UP
EOF

daemons=()
leave() {
    local daemon
    scancel --quiet --full --signal=KILL --user=root 2>/dev/null || true
    for daemon in "${daemons[@]}"; do
        kill "$daemon" 2>/dev/null || true
    done
    wait 2>/dev/null || true
    rm -rf "$munge"
}
trap leave EXIT

idle() { { sinfo --noheader --Node --format=%T 2>/dev/null || true; } | grep -c '^idle$' || true; }

munged --force --foreground --key-file="$munge/key" --socket="$munge/socket" \
    --pid-file="$munge/pid" --log-file="$munge/log" --seed-file="$munge/seed" >"$folder/munged.log" 2>&1 &
daemons+=($!)
for _ in {1..50}; do [[ -S $munge/socket ]] && break || sleep 0.2; done
[[ -S $munge/socket ]] || fail "munged does not start"
slurmctld -D >"$folder/slurmctld.out.log" 2>&1 &
daemons+=($!)
for node in node0 node1; do
    slurmd -D -N "$node" >"$folder/$node.out.log" 2>&1 &
    daemons+=($!)
done
for _ in {1..100}; do
    (($(idle) == 2)) && break
    sleep 0.3
done
(($(idle) == 2)) || fail "the nodes do not come up"

# ------------------------------------------------------------------ a tiny model and a corpus

(cd "$root" && "$python" - "$folder/corpus" <<'EOF'
import sys
from pathlib import Path

from tests.mcore.runs import write_corpus

write_corpus(Path(sys.argv[1]), [90, 20, 40, 128, 9, 60] * 40)
EOF
)
cat >"$folder/python" <<EOF
#!/usr/bin/env bash
export MASTER_ADDR=127.0.0.1 # the nodes' names are known to Slurm alone
exec "$python" "\$@" --num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 \
    --num-query-groups 2 --tokenizer-type NullTokenizer --vocab-size 127 --split 100,0,0 \
    --eval-iters 0 --save-interval 1000 --lr-warmup-iters 0 --distributed-timeout-minutes 2 \
    --epp-cost-model analytic
EOF
chmod +x "$folder/python"
: >"$folder/no-tokenizer"

submit() { # name of the output
    env PYTHON="$folder/python" DATA="$folder/corpus" TOKENIZER="$folder/no-tokenizer" \
        RUN="$folder/run" PP=2 TP=1 CONTEXT=128 BATCH=6 ITERS="$iters" \
        MASTER_PORT=$((port + 3)) GLOO_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES= \
        sbatch --parsable --export=ALL --chdir="$root" --nodes=2 --ntasks-per-node=1 --gpus-per-node=0 \
        --cpus-per-task=1 --time=30 --output="$folder/$1.log" "$sbatch_file"
}

ended() { [[ -z $(squeue --noheader --jobs="$1" 2>/dev/null) ]]; }

until_so() { # what is waited for, the job's log, a command
    local what=$1 log=$2 deadline=$((SECONDS + patience))
    shift 2
    until "$@"; do
        ((SECONDS < deadline)) || fail "$what: not within $patience s"
        sleep 0.5
    done
}

iterations() { # of a log, one a line
    { grep -oE 'iteration +[0-9]+/' "$folder/$1.log" 2>/dev/null || true; } | grep -oE '[0-9]+'
}
has_trained() { (($(iterations "$1" | wc -l) >= stop_behind)) || ended "$job"; }

# ------------------------------------------------------------------ trained, told to end, resumed

job=$(submit first)
until_so "the first iterations" first has_trained first
ended "$job" && fail "the first job ended by itself"
scancel --signal=TERM "$job"
until_so "the end after TERM" first ended "$job"
last=$(iterations first | tail -n 1)
saved=$(cat "$folder/run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || true)
[[ -n $saved ]] || fail "TERM left no checkpoint"
[[ $saved == "$last" ]] || fail "the checkpoint is of iteration $saved, the last was $last"
((last < iters)) || fail "the job was over before TERM came: give it more iterations"

job=$(submit second)
until_so "the second job" second ended "$job"
went_on=$(iterations second | sed -n 1p)
over=$(iterations second | tail -n 1)
[[ $went_on == $((last + 1)) ]] || fail "the second job began at iteration $went_on, not $((last + 1))"
[[ $over == "$iters" ]] || fail "the second job ended at iteration $over of $iters"
printf 'slurm rehearsal: stopped by TERM behind iteration %s, resumed, ended at %s\n' "$last" "$over"
