"""Certifies small copies of published models, by the flags that ``--model`` makes of their facts.

python -m tests.mcore.certify_published [NAME ...]   a line each; docs/how/planner.md has the table
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cost.hub_models import HUB_MODELS

# Dense with biases, norms of Q and K, and scaled RoPE; experts; latents; windows and sinks; DSA;
# Mamba with attention; gated delta net. None needs a flag that certify refuses.
NAMES = (
    *("llama-3.1-8b", "qwen2.5-7b", "qwen3-14b", "starcoder2-3b", "mixtral-8x7b", "qwen3-30b-a3b"),
    *("gpt-oss-20b", "mistral-7b-v0.1", "deepseek-v3", "deepseek-v3.2", "glm-4.5-air"),
    *("nemotron-h-8b", "nemotron-3-nano", "qwen3-next-80b"),
)


def certified(name: str, folder: Path, *flags: str) -> tuple[bool, str]:
    """Return whether the model of ``name`` passed, and the last line of its certificate."""
    (folder / "config.json").write_text(json.dumps(HUB_MODELS[name].keys))
    words = ["certify", "--model", str(folder), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_epp", *words], capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


def main() -> int:
    """0: all passed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or NAMES:
            passed, line = certified(name, Path(folder), "--pp", "2", "--batches", "3")
            failed += not passed
            print(f"{'passed' if passed else 'FAILED':8}{name:24}{line[:160]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
