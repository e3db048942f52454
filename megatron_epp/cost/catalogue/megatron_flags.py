"""Megatron's flags of a model: sizes from the cost model, other properties from a config.json."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_epp.cost.catalogue.hub_file import HubConfig
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.kinds.layer import LayerShape

PATTERN = "--hybrid-layer-pattern"
# Coefficients of the auxiliary loss of a model that states none: without and with expert biases.
AUX_LOSS, AUX_LOSS_WITH_BIASES = 1e-3, 1e-4
# Keys of a RoPE scaling that flags express or that have no effect on the model.
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "finetuned"),
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "mrope_interleaved"),
}
# Keys without a flag, with their neutral values.
_UNSAID_KEYS: Mapping[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "logit_scale": (1.0,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "use_parallel_residual": (False,),
    "alibi": (False,),
    "router_jitter_noise": (0,),  # --epp refuses --moe-input-jitter-eps
}


class ModelFlags(NamedTuple):
    """Megatron's flags of a model, in groups that belong on one line.

    Attributes:
        groups: flags with their values.
        unsaid: properties of the model for which Megatron has no flag; ``groups`` do not set them.
        assumed: unknown properties, with the values that were assumed.
    """

    groups: list[list[str]]
    unsaid: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def entry(self) -> str:
        """Name of the Python module that trains a model with these flags."""
        return f"megatron_epp.pretrain_{'hybrid' if self.hybrid else 'gpt'}"

    @property
    def hybrid(self) -> bool:
        """Whether the model is a HybridModel; its pattern also defines the layers of each stage."""
        return any(group[0] == PATTERN for group in self.groups)

    @property
    def indexed(self) -> bool:
        """Whether attention has an indexer (DSA)."""
        return any(word.startswith("--dsa-indexer") for group in self.groups for word in group)

    @property
    def fuses_rope(self) -> bool:
        """Whether Megatron's own layers can fuse RoPE; MLA does with YaRN only."""
        return not self.indexed and ["--rope-type", "rope"] not in self.groups


def model_flags(
    model: Model, config: HubConfig | None, tp: int = 1, stages: Sequence[int] = ()
) -> ModelFlags:
    """Return Megatron's flags of ``model``.

    Args:
        model: sizes of the model.
        config: other properties of the model; None: unknown.
        tp: tensor-parallel size; the vocabulary is padded if ``tp`` does not divide it.
        stages: layers of every stage, for a HybridModel's pattern; empty: no division into stages.

    Raises:
        ValueError: a value in ``config`` is invalid.
    """
    shapes = [model.kinds[kind] for kind in model.layer_kinds] or [LayerShape()] * model.layers
    groups, unsaid = _size_flags(model, shapes, tp, stages)
    groups.append(["--attention-dropout", "0", "--hidden-dropout", "0"])
    if config is None:
        groups += [
            ["--position-embedding-type", "rope", "--normalization", "RMSNorm"],
            ["--disable-bias-linear", *(["--swiglu"] if model.gated else [])],
        ]
        assumed = ["RoPE of base 10000, RMSNorm of epsilon 1e-5, no biases"]
        if any(shape.experts for shape in shapes):
            groups.append(_balance_flags("aux_loss", AUX_LOSS))
            assumed.append(f"a softmax over the chosen experts, auxiliary loss {AUX_LOSS:g}")
        return ModelFlags(groups, tuple(unsaid), tuple(assumed))
    style = _Style(model, shapes, config)
    groups += style.groups()
    unsaid += [each for each in style.unsaid if each not in unsaid]
    of_file = config.name not in MODELS
    assumed = [f"{key} {value}" for key, value in config.assumed.items() if of_file]
    return ModelFlags([group for group in groups if group], tuple(unsaid), tuple(assumed))


# ------------------------------------------------------------------ sizes


def _size_flags(
    model: Model, shapes: Sequence[LayerShape], tp: int, stages: Sequence[int]
) -> tuple[list[list[str]], list[str]]:
    """Return the flags of the model's sizes, and descriptions of sizes that have no flag."""
    first = {shape.attention: shape for shape in reversed(shapes)}.get(True, shapes[0])
    hybrid = any(shape.mamba_heads or not _is_transformer(shape) for shape in shapes)
    padded = model.vocabulary
    if padded % tp:
        padded += -padded % (128 * tp)
    groups = [
        ["--hidden-size", str(model.hidden), "--ffn-hidden-size", str(model.ffn_hidden)],
        ["--num-attention-heads", str(model.heads), "--padded-vocab-size", str(padded)],
    ]
    unsaid = []
    if hybrid:
        symbols = "".join(_layer_symbol(shape) for shape in shapes)
        if "?" in symbols:
            unsaid.append("attention and Mamba in one layer")
        ends = [0, *itertools.accumulate(stages or (len(symbols),))]
        groups.append([PATTERN, "|".join(symbols[i:j] for i, j in itertools.pairwise(ends))])
    else:
        groups.insert(0, ["--num-layers", str(len(shapes))])
    if first.kv_rank:
        groups += _latent_flags(model, first)
    else:
        groups.append(["--kv-channels", str(model.head_size)])
        if model.kv_heads != model.heads:
            groups.append(["--group-query-attention", "--num-query-groups", str(model.kv_heads)])
    if first.output_gate:
        groups.append(["--attention-output-gate"])
    if not model.tied:
        groups.append(["--untie-embeddings-and-output-weights"])
    groups += _window_flags(shapes) + _state_flags(shapes) + _expert_flags(shapes, hybrid)
    if any(shape.predicts for shape in shapes):
        unsaid.append("multi-token prediction")
    if any(shape.ffn_hidden not in (0, model.ffn_hidden) for shape in shapes):
        unsaid.append("dense MLPs of several widths")
    return groups, unsaid


def _is_transformer(shape: LayerShape) -> bool:
    return shape.mlp and bool(shape.attention or shape.delta_heads)


def _layer_symbol(shape: LayerShape) -> str:
    """Return the symbol of a HybridModel's layer; ? if no symbol describes the layer."""
    known = {
        "*": shape.attention,
        "M": shape.mamba_heads,
        "G": shape.delta_heads,
        "E" if shape.experts else "-": shape.mlp,
    }
    mixers = [symbol for symbol, there in known.items() if there]
    if shape.attention and shape.kv_rank:
        mixers[0] = "D" if shape.index_heads else "+"
    return mixers[0] if len(mixers) == 1 else "?"


def _latent_flags(model: Model, shape: LayerShape) -> list[list[str]]:
    groups = [
        ["--multi-latent-attention", "--kv-lora-rank", str(shape.kv_rank)],
        ["--qk-head-dim", str(model.head_size), "--qk-pos-emb-head-dim", str(shape.rotary_size)],
        ["--v-head-dim", str(shape.value_size or model.head_size)],
    ]
    if shape.query_rank:
        groups.append(["--q-lora-rank", str(shape.query_rank)])
    if shape.index_heads:
        heads, size, keys = map(str, (shape.index_heads, shape.index_size, shape.chosen_keys))
        groups.append(["--experimental-attention-variant", "dsa", "--dsa-indexer-n-heads", heads])
        groups.append(["--dsa-indexer-head-dim", size, "--dsa-indexer-topk", keys])
    return groups


def _window_flags(shapes: Sequence[LayerShape]) -> list[list[str]]:
    """Return the flags of sliding windows; Megatron does not count the query's own token."""
    attention = [shape for shape in shapes if shape.attention]
    windows = [shape.window for shape in attention]
    if not any(windows):
        return []
    group = ["--window-size", f"{max(windows) - 1},0"]
    if not all(windows):
        mask = [bool(shape.window) for shape in shapes]
        group += ["--window-attn-skip-freq", _mask_text(mask)]
    return [group]


def _state_flags(shapes: Sequence[LayerShape]) -> list[list[str]]:
    """Return the flags of layers with a recurrent state."""
    shape = next((shape for shape in shapes if shape.state_heads), None)
    if shape is None:
        return []
    heads, groups = str(shape.state_heads), str(shape.state_groups)
    keys, values = str(shape.state_keys), str(shape.state_values)
    if shape.mamba_heads:
        return [
            ["--mamba-num-heads", heads, "--mamba-num-groups", groups],
            ["--mamba-state-dim", keys, "--mamba-head-dim", values],
        ]
    mask = _mask_text([bool(each.delta_heads) for each in shapes])
    return [
        ["--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", mask],
        ["--linear-num-value-heads", heads, "--linear-num-key-heads", groups],
        ["--linear-key-head-dim", keys, "--linear-value-head-dim", values],
    ]


def _expert_flags(shapes: Sequence[LayerShape], hybrid: bool) -> list[list[str]]:
    shape = next((shape for shape in shapes if shape.experts), None)
    if shape is None:
        return []
    groups = [
        ["--num-experts", str(shape.experts), "--moe-router-topk", str(shape.active_experts)],
        ["--moe-ffn-hidden-size", str(shape.expert_hidden)],
    ]
    if shape.shared_hidden:
        groups.append(["--moe-shared-expert-intermediate-size", str(shape.shared_hidden)])
    if shape.expert_latent:
        groups.append(["--moe-latent-size", str(shape.expert_latent)])
    mask = [bool(each.experts) for each in shapes]
    if not hybrid and not all(mask):
        groups.append(["--moe-layer-freq", _mask_text(mask)])
    return groups


def _balance_flags(kind: str, coefficient: float) -> list[str]:
    """Return the flags of an auxiliary loss that balances experts, or of none."""
    if not coefficient:
        return ["--moe-router-load-balancing-type", "none"]
    balanced = ["--moe-router-load-balancing-type", kind]
    return [*balanced, "--moe-aux-loss-coeff", f"{coefficient:g}"]


def _mask_text(mask: Sequence[bool]) -> str:
    """Return a mask of layers in Megatron's syntax, such as ``([0]*3+[1]*58)``."""
    for period in range(1, len(mask)):
        if len(mask) % period == 0 and list(mask[:period]) * (len(mask) // period) == list(mask):
            return f"{_mask_text(mask[:period])}*{len(mask) // period}"
    runs = ((int(each), len(list(run))) for each, run in itertools.groupby(mask))
    return "(" + "+".join(f"[{each}]*{count}" for each, count in runs) + ")"


# ------------------------------------------------------------------ other properties in a
# config.json


class _Style:
    """Flags of properties that the cost model does not use.

    Attributes:
        unsaid: properties without a flag, collected while flags are computed.
    """

    def __init__(self, model: Model, shapes: Sequence[LayerShape], config: HubConfig):
        self.model, self.shapes, self.config = model, shapes, config
        self.latent = any(shape.kv_rank for shape in shapes)
        self.unsaid = list(config.family.unsaid)

    def groups(self) -> list[list[str]]:
        """Return all flags, in groups."""
        for key, neutral in _UNSAID_KEYS.items():
            value = self.config.value(key)
            if value is not None and value not in neutral:
                self.unsaid.append(f"{key} {value}")
        groups = self._norms() + self._activation() + self._biases()
        return groups + self._positions() + self._router()

    def _norms(self) -> list[list[str]]:
        family = self.config.family
        epsilon = self.config.number("norm_eps", 1e-5)
        groups = [["--normalization", family.norm, "--norm-epsilon", f"{epsilon:g}"]]
        if family.around_zero:
            groups.append(["--apply-layernorm-1p"])
        if self.config.model_type == "llama4_text":
            if self.config.flag("use_qk_norm"):
                self.unsaid.append("norms of Q and K in layers with RoPE alone")
        elif self.latent or family.qk_norm or self._stated_qk_norm():
            groups.append(["--qk-layernorm"])
        scale = self.config.value("query_pre_attn_scalar")
        if scale is not None and scale != self.model.head_size:
            self.unsaid.append(f"query_pre_attn_scalar {scale}")
        return groups

    def _stated_qk_norm(self) -> bool:
        return "use_qk_norm" in self.config.family.keys and self.config.flag("use_qk_norm")

    def _activation(self) -> list[list[str]]:
        gated, act = self.model.gated, self.config.word("hidden_act")
        if not any(shape.mlp for shape in self.shapes):
            return []
        if self.config.model_type == "gpt_oss":
            clamp = self.config.number("swiglu_limit")
            sinks = ["--softmax-type", "learnable"]
            glu = ["--quick-geglu", "--glu-linear-offset", "1"]
            return [[*glu, "--activation-func-clamp-value", f"{clamp:g}"], sinks]
        if gated and act == "silu":
            return [["--swiglu"]]
        if not gated and act == "relu2":
            return [["--squared-relu"]]
        if not gated and act in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"):
            return []  # Megatron fuses this activation with biases
        if not gated and act == "gelu":
            return [["--no-bias-gelu-fusion"]]
        self.unsaid.append(f"hidden_act {act}{' with a gate' if gated else ''}")
        return []

    def _biases(self) -> list[list[str]]:
        config, family = self.config, self.config.family
        everywhere = config.flag("use_bias")
        stated = config.flag("attention_bias") or config.flag("qkv_bias") or everywhere
        query = family.qkv_bias or stated
        output = bool(family.out_bias) and config.flag(family.out_bias)
        if config.model_type == "gpt2":
            output = True
        feed = family.mlp_bias or config.flag("mlp_bias") or everywhere
        if query and output and feed:
            return []
        if output or feed:
            names = ["attention's output"] * output + ["MLPs"] * feed
            self.unsaid.append(f"biases of {' and '.join(names)}, not of all linears")
        return [["--disable-bias-linear", *(["--add-qkv-bias"] if query else [])]]

    def _positions(self) -> list[list[str]]:
        kind = self.config.family.positions
        if kind != "rope":
            return [["--position-embedding-type", kind]]
        rope = self._rope_parameters()
        groups = [self._rotary_base(), self._rotary_percent()]
        if self.config.family.interleaved:
            groups.append(["--rotary-interleaved"])
        return [*groups, self._without_rope(), *self._scaling(rope)]

    def _rope_parameters(self) -> Mapping[str, Any]:
        """Return the RoPE scaling; if it differs by layer kind, that of the file's first kind."""
        key = "rope_parameters" if self.config.value("rope_parameters") else "rope_scaling"
        rope = self.config.mapping(key)
        kinds = [each for each in rope.values() if isinstance(each, Mapping)]
        if kinds:
            if any(each != kinds[0] for each in kinds):
                self.unsaid.append("RoPE that differs by layer")
            return kinds[0]
        local = self.config.value("rope_local_base_freq")
        if local not in (None, self.config.value("rope_theta")):
            self.unsaid.append(f"rope_local_base_freq {local} of windows")
        return rope

    def _rotary_base(self) -> list[str]:
        base = self.config.number("rope_theta", 1e4)
        if abs(round(base) - base) > 1e-6 * base:
            self.unsaid.append(f"rope_theta {base}: --rotary-base is a whole number")
        return ["--rotary-base", str(round(base))]

    def _rotary_percent(self) -> list[str]:
        keys = self.config.keys
        stated = (
            key for key in ("partial_rotary_factor", "rotary_pct") if keys.get(key) is not None
        )
        if (key := next(stated, None)) is None and self.config.value("rotary_dim") is not None:
            fraction = self.config.size("rotary_dim") / self.model.head_size
        else:
            fraction = self.config.number(key or "partial_rotary_factor", 1.0)
        return [] if fraction == 1 or self.latent else ["--rotary-percent", f"{fraction:g}"]

    def _without_rope(self) -> list[str]:
        """Return the flags of layers without RoPE."""
        layers = len(self.shapes)
        mask = self.config.by_layer("no_rope_layers", layers, int) or []
        every = self.config.value("no_rope_layer_interval")
        if not mask and every is not None:
            every = self.config.size("no_rope_layer_interval")
            mask = [int(number % every != 0) for number in range(1, layers + 1)]
        if not mask or all(mask):
            return []
        return ["--no-rope-freq", _mask_text([not each for each in mask])]

    def _scaling(self, rope: Mapping[str, Any]) -> list[list[str]]:
        """Return the flags of a RoPE scaling; add values without a flag to ``unsaid``."""
        config, kind = self.config, rope.get("rope_type", rope.get("type", "default"))

        def number(name: str, default: float | None = None) -> str:
            value = rope.get(name)
            value = config.require_number(
                f"rope_scaling.{name}", default if value is None else value
            )
            return f"{value:g}"

        def scales() -> list[str]:
            mscale, of_all = number("mscale", 1.0), number("mscale_all_dim", 0.0)
            return ["--mscale", mscale, "--mscale-all-dim", of_all]

        def require(**usual: float) -> None:
            for name, value in usual.items():
                if rope.get(name, value) != value:
                    self.unsaid.append(f"rope_scaling.{name} {rope[name]}")

        if self.latent:
            factor = number("factor") if kind == "yarn" else "1"
            groups = [["--rope-type", "yarn" if kind == "yarn" else "rope"]]
            groups.append(["--rotary-scaling-factor", factor])
            if kind == "yarn":
                groups.append(scales())
                require(beta_fast=32, beta_slow=1, original_max_position_embeddings=4096)
        elif kind == "llama3":
            groups = [["--use-rope-scaling", "--rope-scaling-factor", number("factor")]]
            require(low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
        elif kind == "yarn":
            original, factor = number("original_max_position_embeddings"), number("factor")
            fast, slow = number("beta_fast", 32), number("beta_slow", 1)
            groups = [
                ["--position-embedding-type", "yarn", "--rotary-scaling-factor", factor],
                ["--yarn-original-max-position-embeddings", original],
                ["--yarn-beta-fast", fast, "--yarn-beta-slow", slow],
                scales(),
            ]
            if rope.get("truncate") is False:
                groups.append(["--no-yarn-correction-range-round-to-int"])
        elif kind == "linear" and number("factor").isdigit():
            groups = [["--rotary-seq-len-interpolation-factor", number("factor")]]
        else:
            groups = []
        if (self.latent or not groups) and kind not in ("default", "mrope", "yarn"):
            stretch = rope.get("factor")
            self.unsaid.append(f"RoPE of type {kind}" + (f", factor {stretch}" if stretch else ""))
        else:
            unread = sorted(rope.keys() - _ROPE_KEYS)
            self.unsaid += [f"rope_scaling.{name} {rope[name]}" for name in unread if rope[name]]
        if self.latent or kind != "yarn":
            groups.insert(0, ["--position-embedding-type", "rope"])
        return groups

    def _router(self) -> list[list[str]]:
        if not any(shape.experts for shape in self.shapes):
            return []
        config, groups = self.config, []
        sigmoid = config.family.sigmoid
        if (scores := config.word("scoring_func")) and scores not in ("sigmoid", "softmax"):
            self.unsaid.append(f"scoring_func {scores}")
        elif scores:
            sigmoid = scores == "sigmoid"
        normalised = config.value("norm_topk_prob", True)
        if config.model_type == "llama4_text":
            scored = ["--moe-router-score-function", "sigmoid", "--moe-apply-probs-on-input"]
            return [scored, *self._losses(biases=False)]
        if sigmoid:
            groups.append(["--moe-router-score-function", "sigmoid"])
            groups.append(["--moe-router-enable-expert-bias"])
            if not normalised:
                self.unsaid.append("norm_topk_prob False with scores by sigmoid")
        elif not normalised:
            groups.append(["--moe-router-pre-softmax"])
        greedy = config.word("topk_method") == "greedy"
        if not greedy and config.value("n_group") not in (None, 1):
            pools, chosen = config.size("n_group"), config.size("topk_group")
            groups.append(["--moe-router-num-groups", str(pools)])
            groups.append(["--moe-router-group-topk", str(chosen)])
            if config.word("topk_method") == "group_limited_greedy":
                self.unsaid.append("groups of experts chosen by their best one")
        if (scale := config.number("routed_scaling_factor", 1.0)) != 1:
            groups.append(["--moe-router-topk-scaling-factor", f"{scale:g}"])
        if config.value("shared_expert_intermediate_size"):
            groups.append(["--moe-shared-expert-gate"])
        return groups + self._losses(biases=sigmoid)

    def _losses(self, *, biases: bool) -> list[list[str]]:
        """Return the flags of the router's losses; ``biases``: whether experts have biases."""
        config = self.config
        rule = AUX_LOSS_WITH_BIASES if biases else AUX_LOSS
        coefficient = config.number("router_aux_loss_coef", rule)
        of_sequences = biases if config.value("seq_aux") is None else config.flag("seq_aux")
        groups = [_balance_flags("seq_aux_loss" if of_sequences else "aux_loss", coefficient)]
        if z_loss := config.number("router_z_loss_coef", 0):
            groups.append(["--moe-z-loss-coeff", f"{z_loss:g}"])
        return groups
