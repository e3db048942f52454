"""What holds inside a process that has become a host without a GPU; test_host.py runs it in one.

Not collected by itself: the host changes torch for the whole process.
"""

import logging
import re
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.mcore.job import job_exit, read_flags
from megatron_epp.mcore.patching import cpu_host, patch_points, releases
from scripts.upstream.compare_upstream import CPU_FLAGS

assert cpu_host.install_cpu_host()


# ------------------------------------------------------------------ torch


def test_a_second_install_changes_nothing():
    before = torch.zeros, torch.Tensor.to, torch.cuda.current_stream
    assert cpu_host.install_cpu_host()
    assert before == (torch.zeros, torch.Tensor.to, torch.cuda.current_stream)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_tensors_for_a_gpu_are_made_on_the_cpu(device):
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device),
        torch.empty(2, pin_memory=True),
        torch.ones(2).new_zeros(3, device=device),
        torch.arange(3).to(device),
        torch.arange(3).to(device=device, dtype=torch.float64),
        torch.ones(2).cuda(non_blocking=True),
        torch.ones(2).pin_memory(),
        torch.ones(2, device=torch.cuda.current_device()),
        torch.nn.Linear(2, 2).to(device).cuda(torch.cuda.current_device()).weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert made[5].dtype == torch.float64
    # Other devices are left alone.
    assert torch.zeros(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"


def test_scripts_with_factories_compile_and_nothing_else_is_compiled():
    @torch.jit.script
    def three(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros([3], dtype=torch.float32)

    assert three(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    assert torch.compile(torch.sum) is torch.compile(dynamic=True)(torch.sum) is torch.sum


# ------------------------------------------------------------------ Megatron on it


def test_the_random_number_tracker_forks_the_cpus_generator(caplog):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("other", 2)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING), tracker.fork("other"):
        first = torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())
    with tracker.fork("other"):
        second = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))
    assert not caplog.records


# ------------------------------------------------------------------ flags


@pytest.fixture
def words(monkeypatch):
    """Set the flags that Megatron's parser reads."""

    def given(text: str) -> None:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *text.split()])

    return given


def test_the_defaults_are_what_the_flags_would_set(words):
    from megatron.training.arguments import parse_args

    words(CPU_FLAGS)
    typed = vars(parse_args())
    words("")
    plain, ours = vars(parse_args()), vars(parse_args(read_flags.prepare_parser))
    changed = {name: typed[name] for name in typed if typed[name] != plain[name]}
    assert changed == cpu_host.cpu_defaults()
    assert changed.items() <= ours.items()
    assert ours["eval_interval"] > 0


FEW = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --tokenizer-type NullTokenizer "
    "--vocab-size 10 --mock-data"
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "--distributed-backend nccl",
            "--distributed-backend nccl: this host has no CUDA GPU; leave the flag out (gloo is "
            "used)",
        ),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        (
            "--epp-plannr=zb-v --epp",
            "unrecognized arguments: --epp-plannr=zb-v; did you mean --epp-planner?",
        ),
        ("--num-layers x", "argument --num-layers: invalid int value: 'x'"),
        # A bare assert of Megatron's is shown with its condition.
        (f"{FEW} --save somewhere", r"(?s).*arguments\.py:\d+: .*args\.save_interval.*"),
    ],
)
def test_what_cannot_be_parsed_or_done_is_said_in_one_line(words, text, line):
    words(text)
    with pytest.raises(ValueError) as refusal:
        read_flags.read_flags()
    said = str(refusal.value)
    assert said == line or re.fullmatch(line, said)
    assert "\n" not in said and job_exit.is_users_mistake(refusal.value)


def test_services_are_started_where_the_parser_leaves_them_to_its_caller(monkeypatch, words):
    """As Megatron's main does since #7418: reading flags starts nothing, services have a function
    of their own. Both orders leave the same behind."""
    from megatron.core import num_microbatches_calculator as batches
    from megatron.training import arguments, global_vars

    def started():
        args = read_flags.read_flags()
        assert global_vars.get_args() is args and args.padded_vocab_size
        assert global_vars.get_tokenizer().vocab_size == 10 and global_vars.get_timers()
        found = args.padded_vocab_size, batches.get_num_microbatches()
        global_vars.unset_global_variables()
        return found

    words(FEW)
    at_once = started()
    whole, services = global_vars.set_global_variables, []

    def start_services(args):
        services.append(args)
        global_vars.unset_global_variables()
        whole(args)

    monkeypatch.setattr(arguments, "set_global_variables", global_vars.set_args)
    monkeypatch.setattr(global_vars, "initialize_runtime_services", start_services, raising=False)
    assert started() == at_once and len(services) == 1


def test_consumed_samples_are_those_of_megatrons_train_state(monkeypatch):
    """Megatron's main counts them there since #7447, and its arguments no longer do."""
    from megatron.training import global_vars

    from megatron_epp.mcore.trainer import job_data
    from megatron_epp.mcore.trainer.hooks import TrainerHooks

    class Documents:
        counts = SimpleNamespace(truncated=0)

        def __len__(self):
            return 4

    starts = []
    hooks = TrainerHooks(make_batches=lambda documents, size, start: starts.append(start))
    data = job_data.JobData("drop", hooks)
    monkeypatch.setattr(data, "_documents", lambda *any: (Documents(), Documents(), Documents()))
    monkeypatch.setattr(job_data, "ScheduledSizes", lambda: lambda consumed: 4)
    args = SimpleNamespace(
        train_samples=8, eval_global_batch_size=4, global_batch_size=4, full_validation=False,
        phase_transition_iterations=None, iteration=1, consumed_train_samples=5,
        consumed_valid_samples=6,
    )  # fmt: skip
    monkeypatch.setattr(job_data, "get_args", lambda: args)
    monkeypatch.setattr(job_data.megatron_gpt, "require_validation", lambda *any: None)
    data.global_batches([8, 4, 4], None)
    state = SimpleNamespace(iteration=7, consumed_train_samples=50, consumed_valid_samples=60)
    monkeypatch.setattr(global_vars, "get_train_state", lambda: state, raising=False)
    data.global_batches([8, 4, 4], None)
    assert starts == [5, 6, 0, 50, 60, 0]
    args.phase_transition_iterations = [5]
    assert job_data.consumed_in_phase(args) == (7 - 5) * 4


# ------------------------------------------------------------------ mistakes and bugs


def test_a_mistake_is_a_value_error_of_ours():
    with pytest.raises(ValueError) as ours:
        patch_points.install(
            [patch_points.schedule_patch_point(lambda original: original), _gone()]
        )
    assert job_exit.is_users_mistake(ours.value)
    with pytest.raises(ValueError) as torchs:
        torch.optim.SGD([], lr=1.0)
    assert not job_exit.is_users_mistake(torchs.value)
    with pytest.raises(TypeError) as bug:
        cpu_host.install_cpu_host("bug")  # type: ignore[call-arg]
    assert not job_exit.is_users_mistake(bug.value)


# ------------------------------------------------------------------ patch points


def _gone():
    return patch_points.PatchPoint(
        name="gone",
        target="megatron.core.datasets.utils.no_such_function",
        when="always",
        reason="",
        replacement=lambda original: original,
    )


def test_the_installed_megatron_is_the_expected_one():
    patch_points.check_patch_points()
    every = patch_points.ALL_PATCH_POINTS
    assert len({one.name for one in every}) == len({one.target for one in every}) == len(every)
    assert all(one.reason for one in every)
    with pytest.raises(ValueError, match=r"datasets\.utils\.no_such_function does not"):
        patch_points.check_patch_points([_gone()])


@pytest.mark.parametrize(
    ("name", "points", "said"),
    [
        (
            "megatron.core.datasets.utils.compile_helpers",
            [patch_points.INDEX_BUILDER],
            r"patch point 'index builder'.*megatron\.core\.datasets\.utils\.compile_helpers",
        ),
        # What the function calls, which is not replaced itself.
        (
            "megatron.training.initialize.set_jit_fusion_options",
            patch_points.EPP_PATCH_POINTS,
            r"patch point 'fusion warm-up'.*set_jit_fusion_options",
        ),
    ],
)
def test_a_changed_function_is_noticed(tmp_path, monkeypatch, name, points, said):
    module, _, function = name.rpartition(".")
    (tmp_path / "elsewhere.py").write_text(f"def {function}():\n    return 'changed'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    changed = getattr(import_module("elsewhere"), function)
    monkeypatch.setattr(name, changed)
    with pytest.raises(ValueError, match=said):
        patch_points.install(points)
    assert getattr(import_module(module), function) is changed


def test_every_patch_point_notices_any_change():
    """The fingerprints differ from one another and from that of an empty source."""
    every = patch_points.ALL_PATCH_POINTS
    for release in releases.RELEASES:
        assert len({release.fingerprints[one.name] for one in every}) == len(every)
    for one in every:
        assert all(patch_points._source(name) for name in (one.target, *one.relies_on)), one


def test_another_version_is_refused(monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.20.1")
    with pytest.raises(ValueError, match=r"megatron-core 0\.20\.1 is installed.*0\.19\.0"):
        patch_points.check_patch_points()


def test_installing_is_idempotent_and_can_be_taken_back(monkeypatch):
    from megatron.training import initialize

    original = initialize._warmup_jit_function
    patch_points.install(patch_points.EPP_PATCH_POINTS)
    replaced = initialize._warmup_jit_function
    patch_points.install(patch_points.EPP_PATCH_POINTS)
    assert replaced is initialize._warmup_jit_function is not original
    assert patch_points.is_installed(patch_points.FUSION_WARM_UP)
    args = SimpleNamespace(**{patch_points.NO_FUSION_WARM_UP: True})  # and no other
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    initialize._warmup_jit_function(tp_size=1)
    patch_points.remove(patch_points.EPP_PATCH_POINTS)
    assert initialize._warmup_jit_function is original
    assert not patch_points.is_installed(patch_points.FUSION_WARM_UP)


def test_the_schedule_starts_from_megatrons_own_each_time():
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    given = []

    def factory(original):
        given.append(original)
        return lambda **kwargs: len(given)

    patch_points.apply_schedule_patch(factory)
    patch_points.apply_schedule_patch(factory)
    assert given == [schedules.get_forward_backward_func] * 2
    assert training.get_forward_backward_func() == 2
    patch_points.remove([patch_points.schedule_patch_point(factory)])
    assert training.get_forward_backward_func is schedules.get_forward_backward_func
