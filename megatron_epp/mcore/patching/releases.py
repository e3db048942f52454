"""Releases of Megatron that the patch points support, with their fingerprints.

    release    megatron.core.__version__    source
    0.19       0.19.0, 0.19.1, 0.19.2       the wheels (0.19.1 was withdrawn), tag core_v0.19.0
    main       0.20.0                       Megatron-LM at d98e8a64, 2026-08-22

External training loops slice models of earlier releases, too (``attach``). Slices need none of
the trainer's patch points; a CPU-only host needs three of them.

    0.16.1, 0.17.1, 0.18.2              the wheels, certified by scripts/upstream/megatron_matrix.py

A fingerprint covers the sources of a patch point's target and ``relies_on`` (patch_points.py).
Between 0.19 and main, the sources of four patch points differ in telemetry spans and in options
that --epp does not set, so the replacements are valid for both releases.

To add a release, read the output of ``scripts/upstream/check_upstream.py`` for it, and add an entry
to ``RELEASES``. A replacement receives the original function, and must work with every release.
Commits of main share a version number, which only one entry may have: the fingerprints of a newer
commit replace those of the older one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NEWEST = "0.19.2"  # the version that requirements.txt pins and tests run on
# First releases whose models external training loops slice: of some layer kinds, and of all.
SLICES, ALL_KINDS = (0, 16), (0, 19)


@dataclass(frozen=True, slots=True)
class Release:
    """Release of Megatron.

    Attributes:
        name: Name of the release in error messages.
        versions: Values of ``megatron.core.__version__``, without a ``+`` and its suffix.
        fingerprints: Fingerprint of each patch point, by the patch point's name.
    """

    name: str
    versions: tuple[str, ...]
    fingerprints: Mapping[str, str]

    def __str__(self) -> str:
        return self.name


STABLE = Release(
    "0.19.0 to 0.19.2",
    ("0.19.0", "0.19.1", "0.19.2"),
    {
        "index builder": "1ab33de687b7a229",
        "resumed optimizer, state": "8881ca2f563866d6",
        "resumed optimizer, load": "5c2af1e56e0b8eec",
        "resumed optimizer, shard": "abb463384d3f18b5",
        "resumed rates": "dcbbe74073ccda74",
        "resumed schedule": "9c2c6886ca10f2b2",
        "no CUDA assertion": "8a15fbb3181368b4",
        "random state": "ae5bcaa0a5784cd3",
        "sequence-parallel norm": "1be52ff5a9990498",
        "expert exchange": "47a1092f05bae7bf",
        "layers of depths": "716a11c1e76a5486",
        "fusion warm-up": "30490ca40d0b9299",
        "column linear": "3b1ac5c4df57a0c4",
        "row linear": "8007ed2c87e73988",
        "micro-batches": "89ce88584483e174",
        "schedule": "c80b46ffc27a0017",
    },
)
MAIN = Release(
    "main of 2026-08-22",
    ("0.20.0",),
    {
        **STABLE.fingerprints,
        "no CUDA assertion": "3e6d95918dd03891",
        "sequence-parallel norm": "24146e85e31ab2c8",
        "column linear": "99509e792c4a5c1a",
        "schedule": "f9504e29f46f0ade",
    },
)
RELEASES = (STABLE, MAIN)
# Releases for external training loops alone, with the patch points of a CPU-only host.
_OF_LOOPS = {
    "random state": STABLE.fingerprints["random state"],
    "sequence-parallel norm": STABLE.fingerprints["sequence-parallel norm"],
    "expert exchange": STABLE.fingerprints["expert exchange"],
}
LOOP_RELEASES = (
    Release("0.16.1", ("0.16.1",), {**_OF_LOOPS, "sequence-parallel norm": "a1c6bb8887884ec0"}),
    Release("0.17.1", ("0.17.1",), _OF_LOOPS),
    Release("0.18.2", ("0.18.2",), _OF_LOOPS),
)


def installed_version() -> str | None:
    """Return the version of the installed Megatron, without importing it.

    The result is None if Megatron is missing or has no version.
    """
    spec = find_spec("megatron") and find_spec("megatron.core")
    if not spec or not spec.origin:
        return None
    file = Path(spec.origin).with_name("package_info.py")
    text = file.read_text() if file.is_file() else ""
    numbers = [re.search(rf"^{name} = (\d+)$", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(one[1] for one in numbers if one) or None


def numbers_of(version: str | None) -> tuple[int, int]:
    """Return (major, minor) of ``version``; for an unknown version, numbers above every release."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else (10**6, 0)


def release_of(version: str, releases: Sequence[Release] = RELEASES) -> Release | None:
    """Return the release of ``releases`` with ``version``; None if there is none."""
    base_version = version.split("+")[0]
    return next((release for release in releases if base_version in release.versions), None)
