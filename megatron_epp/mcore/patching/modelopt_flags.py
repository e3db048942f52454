"""Model flags of Megatron-LM's ModelOpt entry point, translated to Megatron's own flags.

The example configurations of ModelOpt (examples/post_training/modelopt/conf) use flags that
pretrain_gpt.py does not have. This package's parser accepts them, with the effect that they have in
ModelOpt (megatron/post_training/arguments.py, model_builder.py). Flags of ModelOpt that do not
describe a model remain unknown.
"""

import argparse
from typing import Any

# flag: (values that the flag sets, by destination of Megatron's parser; help text)
MEANT: dict[str, tuple[dict[str, Any], str]] = {
    "--export-qk-l2-norm": (
        {"qk_l2_norm": True},
        "queries and keys over their lengths, as --qk-l2-norm",
    ),
    "--export-moe-apply-probs-on-input": (
        {"moe_apply_probs_on_input": True},
        "experts' inputs scaled, not their outputs, as --moe-apply-probs-on-input",
    ),
    "--enable-gpt-oss": (
        {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": 32.0,
            "yarn_original_max_position_embeddings": 131072,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": False,
        },
        "YaRN as of gpt-oss, as --position-embedding-type yarn with --rotary-scaling-factor 32 and "
        "its kin",
    ),
    "--export-force-local-attention": ({}, "no effect: the attention of slices, --epp-attention"),
}


class _Meant(argparse.Action):
    """Action that sets the arguments ``meant``; only later flags can override these values."""

    def __init__(self, option_strings: list[str], dest: str, meant: dict[str, Any], **others: Any):
        super().__init__(option_strings, dest, nargs=0, default=False, **others)
        self.meant = meant

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        vars(namespace).update(self.meant)
        setattr(namespace, self.dest, True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ModelOpt's flags to Megatron's ``parser``, except flags that the parser already has."""
    known = {option for action in parser._actions for option in action.option_strings}
    group = parser.add_argument_group("of Megatron-LM's entry for ModelOpt")
    for flag, (meant, what) in MEANT.items():
        if flag not in known:
            group.add_argument(flag, action=_Meant, meant=meant, help=what)
