"""Launch script of a choice, with the flags of Megatron and of --epp."""

import argparse
import shlex
from collections.abc import Sequence

from megatron_epp.cli.tune.job import TunedJob
from megatron_epp.cli.tune.stock_job import StockJob, connections, length_multiple, stock_job
from megatron_epp.cost.catalogue.hub_file import HubConfig
from megatron_epp.cost.catalogue.megatron_flags import ModelFlags, model_flags
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.ir.errors import printable
from megatron_epp.ir.placement import EVENLY
from megatron_epp.planner.choose.partition import layout_flags, layout_text
from megatron_epp.planner.tuning.survey import ELASTIC, Choice

_HEAD = """\
#!/usr/bin/env bash
# {title}
# Written by `python -m megatron_epp tune`.
{comments}# Predicted: {seconds:.4g} s an iteration, {rate:.4g} tokens/s.
#
#   DATA=corpus_prefix TOKENIZER=tokenizer.model bash {name} [more Megatron flags]
set -euo pipefail
: "${{DATA:?the prefix of a .bin/.idx corpus}}" "${{TOKENIZER:?a sentencepiece model}}"
{several}
# {queues}
export CUDA_DEVICE_MAX_CONNECTIONS={connections}
export PYTORCH_CUDA_ALLOC_CONF=${{PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}

flags=(
{flags}
)
exec "${{PYTHON:-python}}" -m torch.distributed.run --nproc-per-node {per_node} \\
    {nodes} \\
    -m {entry} "${{flags[@]}}" \\
    --data-path "$DATA" --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER" "$@"
"""
_QUEUES = {
    1: "One hardware queue: Megatron's own overlap depends on the order of issue.",
    32: "Many hardware queues: with one, a posted receive may delay what its sender waits for.",
}
_ONE_NODE = "--standalone"
_SEVERAL_NODES = """--nnodes {nodes} --node-rank "$NODE_RANK" \\
    --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}"\
"""
_RENDEZVOUS = """
# Run on each of {nodes} nodes, by srun or with NODE_RANK and MASTER_ADDR.
fail() {{
    echo "$0: $1; expected srun --nodes {nodes} --ntasks-per-node 1 bash $0, or on each node" \\
        "NODE_RANK, 0 to {last}, and MASTER_ADDR, the host of node 0" >&2
    exit 2
}}
[[ ${{SLURM_NNODES:-{nodes}}} == {nodes} ]] || fail "SLURM_NNODES=$SLURM_NNODES, not {nodes}"
{hosts}
NODE_RANK=${{NODE_RANK:-${{SLURM_NODEID:-}}}}
[[ -n $NODE_RANK ]] || fail "no NODE_RANK"
[[ $NODE_RANK =~ ^[0-9]+$ ]] && ((10#$NODE_RANK < {nodes})) || fail "NODE_RANK=$NODE_RANK"
slurm_nodes=${{SLURM_STEP_NODELIST:-${{SLURM_JOB_NODELIST:-}}}}
if [[ -z ${{MASTER_ADDR:-}} && -n $slurm_nodes ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$slurm_nodes" 2>/dev/null) || fail "no MASTER_ADDR"
    MASTER_ADDR=${{MASTER_ADDR%%$'\\n'*}}
fi
[[ -n ${{MASTER_ADDR:-}} ]] || fail "no MASTER_ADDR"
"""
_HOSTS = """\
# By node rank, so that groups lie whole on the grid of nodes.
hosts=({hosts})
for rank in "${{!hosts[@]}}"; do
    if [[ ${{hosts[rank]}} == "$(hostname)" || ${{hosts[rank]}} == "$(hostname -s)" ]]; then
        NODE_RANK=${{NODE_RANK:-$rank}}
    fi
done
[[ -n ${{NODE_RANK:-}} ]] || fail "$(hostname) is not in the list of hosts"
MASTER_ADDR=${{MASTER_ADDR:-${{hosts[0]}}}}\
"""


def launch_script(
    job: TunedJob,
    choice: Choice,
    documents: int,
    context: int,
    hosts: Sequence[str] = (),
) -> str:
    """Return a bash script that launches ``choice``.

    Args:
        job: devices and model.
        choice: choice that the script launches.
        documents: number of documents of a global batch.
        context: tokens of the longest document.
        hosts: host names in the order of node ranks; () if they are unknown.

    Raises:
        ValueError: if ``choice`` uses Megatron's own schedule, and Megatron cannot run it, or no
            length of samples matches the batches.
    """
    model, config, arguments = job.model, job.config, job.arguments
    of_model, stock = _parts(job, choice)
    notes = config.notes if config is not None else ()
    seconds, rate, queues = choice.seconds, choice.tokens_per_second, connections(job, choice)
    if stock is not None:
        rate, seconds = rate * seconds / stock.seconds, stock.seconds
        notes = (*notes, "Megatron's own schedule, without --epp.", stock.note)
    if of_model.assumed:
        assumed = ", ".join(of_model.assumed)
        notes = (*notes, f"Not in the model's description, so assumed: {assumed}.")
    # printable: a line break would end the comment and start a command.
    comments = [f"# {printable(note)}\n" for note in notes]
    groups = _all_flags(job, choice, of_model, stock, documents, context)
    lines = (f"    {shlex.join(group)}" for group in groups)
    nodes = job.devices // job.host_devices  # torchrun's and Slurm's
    return _HEAD.format(
        title=printable(
            f"{model.name} on {nodes} x {job.host_devices} {arguments.device}: {choice.layout}"
        ),
        name=printable(arguments.script),
        several=_rendezvous(nodes, hosts),
        seconds=seconds,
        rate=rate,
        queues=_QUEUES[queues],
        connections=queues,
        nodes=_ONE_NODE if nodes == 1 else _SEVERAL_NODES.format(nodes=nodes),
        per_node=job.host_devices,
        flags="\n".join(lines),
        comments="".join(comments),
        entry=of_model.entry,
    )


def _rendezvous(nodes: int, hosts: Sequence[str]) -> str:
    """Return the lines that find a node's rank and the first node; "" for one node."""
    if nodes == 1:
        return ""
    listed = _HOSTS.format(hosts=shlex.join(hosts)) if hosts else ""
    return _RENDEZVOUS.format(nodes=nodes, last=nodes - 1, hosts=listed)


def _parts(job: TunedJob, choice: Choice) -> tuple[ModelFlags, StockJob | None]:
    """Return the model's flags, and the job of Megatron's own that is nearest to a row of stock."""
    of_model = _model_flags(job, choice)
    return of_model, None if choice.stock is None else stock_job(job, choice, of_model)


def _model_flags(job: TunedJob, choice: Choice) -> ModelFlags:
    stages = () if _is_placed(choice) or choice.layout.pp == 1 else choice.layers
    return model_flags(job.model, job.config, choice.layout.tp, stages)


def _is_placed(choice: Choice) -> bool:
    """Return whether --epp-placement says the stages, and not Megatron's own flags."""
    return bool(choice.place) and choice.planner == ELASTIC


def _all_flags(
    job: TunedJob,
    choice: Choice,
    of_model: ModelFlags,
    stock: StockJob | None,
    documents: int,
    context: int,
) -> list[list[str]]:
    """Return all flags of a choice, in groups of flags that share a line.

    ``stock`` is the job of Megatron's own for a row of stock; otherwise None.
    """
    multiple = length_multiple(choice.layout)
    tokens, samples = -(-context // multiple) * multiple, documents
    own = elastic_flags(choice, job.arguments)
    if stock is not None:
        tokens, samples, own = stock.tokens, stock.samples, stock.flags
    return [
        *of_model.groups,
        ["--seq-length", str(tokens), "--max-position-embeddings", str(tokens)],
        *layout_arguments(choice, of_model.hybrid),
        *training_flags(samples, bf16=job.device.name != "cpu"),
        *expert_flags(job.model),
        *own,
    ]


def require_sayable(model: Model, config: HubConfig | None) -> None:
    """Raise a ValueError if Megatron's flags cannot express the model."""
    if unsaid := model_flags(model, config).unsaid:
        raise ValueError(
            f"--script: Megatron's flags cannot say of {model.name}: {'; '.join(unsaid)}; leave "
            "--script out"
        )


def layout_arguments(choice: Choice, hybrid: bool = False) -> list[list[str]]:
    """Return the flags of the parallel sizes and of the stages.

    With --epp and several stages per rank, --epp-placement sets the stages. Otherwise, the pattern
    of a HybridModel contains the stages, and Megatron's own flags set the stages of other models.
    If all stages have the same number of layers, the flag is ``--epp-placement even`` with --epp.
    """
    layout = choice.layout
    flags = [["--tensor-model-parallel-size", str(layout.tp)]]
    if layout.tp > 1:
        flags.append(["--sequence-parallel"])
    flags += [
        ["--context-parallel-size", str(layout.cp)],
        ["--pipeline-model-parallel-size", str(layout.pp)],
    ]
    if choice.ep > 1:
        flags.append(["--expert-model-parallel-size", str(choice.ep)])
        flags.append(["--expert-tensor-parallel-size", "1"])
        flags.append(["--moe-token-dispatcher-type", "alltoall"])
    if _is_placed(choice):
        place, layers = (" ".join(map(str, each)) for each in (choice.place, choice.layers))
        flags.append(["--epp-placement", f"place {place} layers {layers}"])
    elif hybrid or layout.pp == 1:
        pass
    elif choice.place:
        flags.append(["--pipeline-model-parallel-layout", layout_text(choice.layers)])
    elif layout_options := layout_flags(choice.layers):
        flags.append(layout_options)
    elif choice.planner == ELASTIC:  # set explicitly: auto might choose otherwise
        flags.append(["--epp-placement", EVENLY])
    return flags


def layouts_line(job: TunedJob, choice: Choice) -> str:
    """Return the line of a --epp-layouts file for ``choice``, which must run --epp.

    The line omits the numbers of layers if all stages have the same number, or if other flags
    determine them (for a HybridModel, and with a placement).
    """
    layout, of_flags = choice.layout, choice.place or _model_flags(job, choice).hybrid
    even = of_flags or not layout_flags(choice.layers)
    layers = "" if even else f" layers {' '.join(map(str, choice.layers))}"
    return f"tp {layout.tp} pp {layout.pp} cp {layout.cp} ep {choice.ep}{layers}"


def training_flags(samples: int, *, bf16: bool) -> list[list[str]]:
    """Return the flags that are common to all models.

    ``samples`` is the global batch size; with --epp, a sample is a document. ``bf16`` is False on
    CPUs, which train in float32 because they are slow in bf16.
    """
    return [
        ["--micro-batch-size", "1", "--global-batch-size", str(samples)],
        ["--train-iters", "1000", "--lr", "3e-4", "--min-lr", "3e-5", "--lr-decay-style", "cosine"],
        ["--weight-decay", "0.1", "--adam-beta2", "0.95", "--clip-grad", "1.0", *["--bf16"] * bf16],
        ["--accumulate-allreduce-grads-in-fp32", "--use-distributed-optimizer"],
        ["--dist-ckpt-optim-fully-reshardable"],
        ["--overlap-grad-reduce", "--overlap-param-gather"],
        ["--log-interval", "1", "--log-throughput", "--eval-iters", "0"],
    ]


def expert_flags(model: Model) -> list[list[str]]:
    """Return the flags of expert kernels, which no config.json contains."""
    return [["--moe-grouped-gemm", "--moe-router-dtype", "fp32"]] if model.most_experts else []


def elastic_flags(choice: Choice, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the flags of --epp; [] if the choice is a baseline."""
    if choice.planner != ELASTIC:
        return []
    flags = [["--epp"]]
    if choice.layout.pp > 1:  # set explicitly: auto might choose otherwise on fewer batches
        flags.append(["--epp-vocab-parallel", "on" if choice.vocabulary_parallel else "off"])
    levers = arguments.levers
    if choice.offload and "offload" not in levers:
        levers += ",offload"
    if levers != "default":
        flags.append(["--epp-levers", levers])
    if arguments.memory_budget_gib:
        budgets = [f"{each:g}" for each in arguments.memory_budget_gib]
        flags.append(["--epp-memory-budget-gib", *budgets])
    if arguments.effort is not None:
        flags.append(["--epp-effort", str(arguments.effort)])
    if arguments.overlong != "truncate":
        flags.append(["--epp-overlong", arguments.overlong])
    return flags
