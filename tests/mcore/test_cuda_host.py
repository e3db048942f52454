"""What a process sets before CUDA starts, and GPUs that torch does not see."""

import os
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.mcore.patching import cpu_host, cuda_host

FLAGS = ["--epp", "--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2"]
NAMES = (
    *(*cuda_host.DEFAULTS, *cuda_host.ALLOCATOR, *cuda_host.SOCKETS, *cuda_host.CUDNN),
    *(cuda_host.MARGIN, *cuda_host.NORM_MARGINS, cuda_host.SHARE, "LOCAL_RANK", "NCCL_HOSTID"),
)


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """Two made-up GPUs; ``context``: the environment when the first tensor was made there;
    ``left_free``: multiprocessors, by torch's products."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    seen = SimpleNamespace(device=None, context=None, left_free=None)
    carve_out = lambda count: setattr(seen, "left_free", count)  # noqa: E731
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", carve_out)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(seen, "device", device))

    def zeros(*size, device):
        assert device == "cuda"
        seen.context = dict(os.environ)

    monkeypatch.setattr(torch, "zeros", zeros)
    return seen


QUEUES, MARGIN = "CUDA_DEVICE_MAX_CONNECTIONS", cuda_host.MARGIN
ALONE = ["--epp"]  # no messages between ranks


@pytest.mark.parametrize(
    ("flags", "given", "context"),
    [
        (
            FLAGS,
            {"LOCAL_RANK": "1"},
            {
                QUEUES: "32",
                "CUDA_MODULE_LOADING": "EAGER",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
        ),
        # What the user set stays,
        (
            FLAGS,
            {
                QUEUES: "8",
                "CUDA_MODULE_LOADING": "LAZY",
                "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
            },
            {QUEUES: "8", "CUDA_MODULE_LOADING": "LAZY", "PYTORCH_CUDA_ALLOC_CONF": None},
        ),
        # but the one queue of Megatron's scripts, where something is received.
        (FLAGS, {QUEUES: "1"}, {QUEUES: "32"}),
        (["--pipeline-model-parallel-size=4", "--epp"], {QUEUES: "1"}, {QUEUES: "32"}),
        (ALONE, {QUEUES: "1"}, {QUEUES: "1"}),
        # Products leave multiprocessors to messages; as many as the user says, or none.
        (ALONE, {}, {MARGIN: None, "left free": None}),
        (FLAGS, {}, {MARGIN: "4", **dict.fromkeys(cuda_host.NORM_MARGINS, "4"), "left free": 4}),
        (FLAGS, {MARGIN: "8"}, {**dict.fromkeys(cuda_host.NORM_MARGINS, "8"), "left free": 8}),
        (FLAGS, {MARGIN: "0"}, {"left free": None}),
        # Ranks share the host's GPUs: NCCL believes each on a host of its own.
        (
            FLAGS,
            {"LOCAL_RANK": "3", "RANK": "3", cuda_host.SHARE: "1"},
            {"NCCL_HOSTID": "epp-3-3", **cuda_host.SOCKETS},
        ),
        # Transformer Engine takes torch's cuDNN, but for one that the user names.
        (ALONE, {"CUDNN_PATH": "/opt/cudnn"}, {"CUDNN_HOME": None}),
    ],
)
def test_what_the_context_begins_with(gpus, monkeypatch, caplog, flags, given, context) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    cuda_host.prepare(flags)
    seen = {**gpus.context, "left free": gpus.left_free}
    assert {name: seen.get(name) for name in context} == context
    local = int(given.get("LOCAL_RANK", 0)) % 2
    assert gpus.device == local and os.environ.get("LOCAL_RANK", "0") == str(local)
    replaced = given.get(QUEUES) == "1" and context[QUEUES] == "32"
    assert replaced == (f"{QUEUES}=1 is taken as 32" in caplog.text)
    assert os.environ[QUEUES] == "1"  # what Megatron asserts
    assert torch._dynamo.config.recompile_limit >= cuda_host.RECOMPILATIONS
    if "CUDNN_PATH" not in given:
        assert os.path.isdir(os.path.join(gpus.context["CUDNN_HOME"], "lib"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({cuda_host.MARGIN: "few"}, "NVTE_EXT_MARGIN_SM=few: expected a whole number"),
        ({"LOCAL_RANK": "2"}, r"local rank 2, but this host has 2 GPU\(s\)"),
        ({cuda_host.SHARE: "yes"}, "EPP_SHARE_GPUS=yes: expected 0 or 1"),
    ],
)
def test_what_a_rank_cannot_begin_with(gpus, monkeypatch, given, said) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        cuda_host.prepare(FLAGS)


def test_megatrons_own_training_and_hosts_without_gpus_are_left_alone(gpus, monkeypatch) -> None:
    before = dict(os.environ)
    cuda_host.prepare(FLAGS[1:])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda_host.prepare(FLAGS)
    assert gpus.context is None and dict(os.environ) == before
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cuda_host.own_cudnn() == {}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A driver with two GPUs that torch cannot use."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{shutil.which('sh')}\necho 550.54.15\necho 550.54.15\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.cuda, "init", init)
    return program


def test_gpus_that_torch_cannot_use_are_no_cpu_host(smi) -> None:
    with pytest.raises(ValueError) as error:
        cpu_host._refuse_unseen_gpus()
    assert "\n" not in str(error.value)
    assert "nvidia-smi lists 2 GPU(s) with driver 550.54.15, but torch" in str(error.value)
    assert "(The NVIDIA driver on your system is too old)" in str(error.value)
    assert "needs driver 580 or newer" in str(error.value)


def test_who_hides_the_gpus_means_it(smi, monkeypatch) -> None:
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        cpu_host._refuse_unseen_gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    smi.write_text(f"#!{shutil.which('sh')}\nexit 9\n")  # a driver that does not run
    cpu_host._refuse_unseen_gpus()
    smi.unlink()
    cpu_host._refuse_unseen_gpus()
