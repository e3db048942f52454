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


def test_the_context_has_many_queues_and_megatron_sees_one(gpus, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    cuda_host.prepare(FLAGS)
    assert gpus.device == 1
    assert gpus.context["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert gpus.context["CUDA_MODULE_LOADING"] == "EAGER"
    assert gpus.context["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert torch._dynamo.config.recompile_limit >= cuda_host.RECOMPILATIONS


def test_what_the_user_set_stays(gpus, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    cuda_host.prepare(FLAGS)
    assert gpus.context["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert gpus.context["CUDA_MODULE_LOADING"] == "LAZY"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in gpus.context


def test_products_leave_room_for_messages(gpus, monkeypatch) -> None:
    """Where there are messages; as much as the user says, or none."""
    cuda_host.prepare(["--epp"])
    assert cuda_host.MARGIN not in gpus.context and gpus.left_free is None
    cuda_host.prepare(FLAGS)
    assert (gpus.context[cuda_host.MARGIN], gpus.left_free) == ("4", 4)
    monkeypatch.setenv(cuda_host.MARGIN, "8")
    cuda_host.prepare(FLAGS)
    assert (gpus.context[cuda_host.MARGIN], gpus.left_free) == ("8", 8)
    for name in cuda_host.NORM_MARGINS:  # set before: as the first of these runs had it
        assert gpus.context[name] == "4"
        monkeypatch.delenv(name)
    cuda_host.prepare(FLAGS)
    assert [gpus.context[name] for name in cuda_host.NORM_MARGINS] == ["8", "8"]
    gpus.left_free = None
    monkeypatch.setenv(cuda_host.MARGIN, "0")
    cuda_host.prepare(FLAGS)
    assert gpus.left_free is None
    monkeypatch.setenv(cuda_host.MARGIN, "few")
    with pytest.raises(ValueError, match="NVTE_EXT_MARGIN_SM=few: expected a whole number"):
        cuda_host.prepare(FLAGS)


@pytest.mark.parametrize("form", ["apart", "together"])
def test_the_one_queue_of_megatrons_scripts_is_replaced(form, gpus, monkeypatch, caplog) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags = FLAGS if form == "apart" else ["--pipeline-model-parallel-size=4", "--epp"]
    cuda_host.prepare(flags)
    assert gpus.context["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"  # what Megatron asserts
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 is taken as 32" in caplog.text


def test_one_queue_stays_where_nothing_is_received(gpus, monkeypatch, caplog) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda_host.prepare(["--epp"])
    assert gpus.context["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not caplog.text


def test_a_rank_without_a_gpu_is_refused(gpus, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"local rank 2, but this host has 2 GPU\(s\)"):
        cuda_host.prepare(FLAGS)


def test_ranks_share_the_hosts_gpus(gpus, monkeypatch) -> None:
    """NCCL believes each on a host of its own; who says nothing of it is refused (above)."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(cuda_host.SHARE, "1")
    cuda_host.prepare(FLAGS)
    assert gpus.device == 1 and os.environ["LOCAL_RANK"] == "1"
    assert gpus.context["NCCL_HOSTID"] == "epp-3-3"
    assert {name: gpus.context[name] for name in cuda_host.SOCKETS} == cuda_host.SOCKETS
    monkeypatch.setenv(cuda_host.SHARE, "yes")
    with pytest.raises(ValueError, match="EPP_SHARE_GPUS=yes: expected 0 or 1"):
        cuda_host.prepare(FLAGS)


def test_transformer_engine_takes_torchs_cudnn(gpus, monkeypatch) -> None:
    """A toolkit's beside it would be another; what the user names stays."""
    cuda_host.prepare(["--epp"])
    assert os.path.isdir(os.path.join(gpus.context["CUDNN_HOME"], "lib"))
    monkeypatch.delenv("CUDNN_HOME")
    monkeypatch.setenv("CUDNN_PATH", "/opt/cudnn")
    cuda_host.prepare(["--epp"])
    assert "CUDNN_HOME" not in gpus.context
    monkeypatch.delenv("CUDNN_PATH")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cuda_host.own_cudnn() == {}


def test_megatrons_own_training_is_left_alone(gpus) -> None:
    cuda_host.prepare(FLAGS[1:])
    assert gpus.context is None
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_a_host_without_gpus_keeps_its_environment(gpus, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = dict(os.environ)
    cuda_host.prepare(FLAGS)
    assert dict(os.environ) == before


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
