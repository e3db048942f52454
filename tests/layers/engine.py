"""Transformer Engine's linears as they behave with delayed weight gradients, for any device.

Written after module/linear.py, layernorm_linear.py, base.py and _common.py of version 2.20.2, whose
names they keep. What is theirs: the store is asked in forward and in backward; a delayed product
takes the bias's gradient with it; nothing is returned for what is delayed, but for a weight that
Megatron's reduction waits for (grad_added_to_main_grad), a tensor without meaning; a fused product
writes into ``main_grad`` of the weight that forward saw, reached by a weak reference; the input is
kept gathered, as the module's own store keeps it: in a queue.
"""

import queue
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import rms_norm


class WeightGradStore:
    def __init__(self, delay_wgrad_compute: bool = False):
        self.context = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list, func) -> None:
        assert self.enabled is True, "delay_wgrad_compute is not enabled"
        self.context.put([tensor_list, func])

    def pop(self):
        assert self.enabled is True, "delay_wgrad_compute is not enabled"
        if self.context.qsize() > 0:
            tensor_list, func = self.context.get()
            return func(*tensor_list), tensor_list
        raise RuntimeError("Pop empty queue. No distributed environment detected.")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight, inp, bias, args):
        ctx.save_for_backward(inp, weight)
        ctx.args, ctx.use_bias = args, bias is not None
        ctx.requires_wgrad = weight.requires_grad
        if args.fuse_wgrad_accumulation:
            ctx.origin_weight_ref = weakref.ref(weight)
            ctx.main_grad_func = lambda: weight.main_grad
        out = inp @ weight.t()
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad_output):
        inp, weight = ctx.saved_tensors
        args = ctx.args
        origin_weight = main_grad = None
        if args.fuse_wgrad_accumulation and ctx.requires_wgrad:
            origin_weight = ctx.origin_weight_ref()
            assert origin_weight is not None, "weight was removed while fusing its gradient"
            main_grad = ctx.main_grad_func()
        dgrad = grad_output @ weight
        wgrad = grad_bias = None
        if ctx.requires_wgrad:
            accumulate = args.fuse_wgrad_accumulation and not args.is_first_microbatch
            use_bias = ctx.use_bias

            def wgrad_gemm(x: Tensor, dy: Tensor):
                x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
                dw, db = dy.t() @ x, dy.sum(0) if use_bias else None
                if main_grad is None:
                    return dw, db
                if not accumulate:
                    main_grad.zero_()
                return main_grad.add_(dw), db

            if args.wgrad_store is not None and args.wgrad_store.delay_wgrad_compute():
                args.wgrad_store.put([inp, grad_output], wgrad_gemm)
            else:
                wgrad, grad_bias = wgrad_gemm(inp, grad_output)
            if args.fuse_wgrad_accumulation and hasattr(origin_weight, "grad_added_to_main_grad"):
                origin_weight.grad_added_to_main_grad = True
                wgrad = torch.full_like(origin_weight, torch.nan)  # nobody may read it
            elif args.fuse_wgrad_accumulation:
                wgrad = None
        return wgrad, dgrad, grad_bias, None


class Linear(nn.Module):
    """With ``return_bias`` whoever calls it adds the bias; with ``unfused_bias`` it does so itself,
    after the product, as rows of a tensor-parallel linear want it."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
        unfused_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ):
        super().__init__()
        self.weight = Parameter(torch.randn(out_features, in_features) / in_features**0.5)
        self.bias = Parameter(torch.randn(out_features)) if bias else None
        self.weight_names = ["weight"]
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.gemm_bias_unfused_add = unfused_bias and self.apply_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.is_first_microbatch = False

    def forward(self, inp: Tensor):
        weight, bias = (getattr(self, name) for name in ("weight", "bias"))
        in_gemm = bias if self.apply_bias and not self.gemm_bias_unfused_add else None
        args = SimpleNamespace(
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            is_first_microbatch=self.is_first_microbatch,
            wgrad_store=self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None,
        )
        out = _Linear.apply(weight, inp, in_gemm, args)
        if self.gemm_bias_unfused_add:
            out = out + bias
        return (out, bias) if self.return_bias else out

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        (wgrad, bgrad), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = wgrad
        if self.use_bias and bgrad is not None and self.bias.grad is None:
            self.bias.grad = bgrad


class LayerNormLinear(Linear):
    """The norm's weight is autograd's, whatever is delayed."""

    __module__ = "transformer_engine.pytorch.module.layernorm_linear"

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **others):
        super().__init__(in_features, out_features, bias, **others)
        self.layer_norm_weight = Parameter(torch.rand(in_features))

    def forward(self, inp: Tensor):
        return super().forward(rms_norm(inp, inp.shape[-1:], self.layer_norm_weight))
