"""verl's engine in slices; verl_grpo.sh makes verl import this module in every process."""

from megatron_epp.frameworks.verl.slices import register_engine

register_engine(memory_gib=40)  # a device's memory less states, rollout engine and some GiB
