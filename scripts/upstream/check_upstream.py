"""Patch points that hold in a Megatron-LM checkout, those that changed, and the changes.

    python scripts/upstream/check_upstream.py --megatron CHECKOUT [--known PATH] [--quiet]

CHECKOUT is any Megatron-LM: a clone, the tree of a release, or an unpacked wheel. The script
neither imports nor runs it, so its dependencies are not needed; a nightly job can use a fresh clone
of main. For every patch point (megatron_epp/mcore/patching/patch_points.py), the sources of its
function, and of the functions on which it relies, are compared with the releases that were read
(releases.py). If no release has the same sources, the script prints the difference to the installed
megatron-core, or to --known PATH. It also checks that every name that this package imports from
Megatron exists.

Exit status: 0 if all patch points hold, and this Megatron can start; 1 if something changed, or the
version number is unknown; 2 if there is no checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--megatron", type=Path, required=True, help="a Megatron-LM checkout")
    parser.add_argument("--known", type=Path, help="what to show differences to (the installed)")
    parser.add_argument("--quiet", action="store_true", help="no differences, only the table")
    options = parser.parse_args()

    import checkout

    from megatron_epp.mcore.patching import patch_points
    from megatron_epp.mcore.patching.releases import release_of

    try:
        looked_at = checkout.Checkout(options.megatron.resolve())
        known = checkout.Checkout((options.known or _installed()).resolve())
        findings = checkout.look(patch_points.ALL_PATCH_POINTS, looked_at, known)
        used = checkout.imported_names(ROOT / "megatron_epp" / "mcore")
        gone = [name for name in used if not looked_at.defines(name)]
    except ValueError as error:
        print(f"check_upstream: {error}", file=sys.stderr)
        return 2

    release = release_of(looked_at.version)
    print(f"{looked_at.root}: megatron-core {looked_at.version}")
    width = max(len(one.patch_point.name) for one in findings)
    for one in findings:
        state = f"as in {one.release}" if one.release else "drifted"
        print(f"  {one.patch_point.name:{width}}  {'patched' if one.patched else state}")
    for name in gone:
        print(f"  gone: {name}, which megatron_epp imports")
    if not options.quiet:
        for one in findings:
            if one.difference:
                print(
                    f"\n{one.patch_point}: fingerprint {one.fingerprint}; {one.patch_point.reason}"
                )
                print("\n".join(one.difference))

    mixed = [one for one in findings if not one.patched and one.release is not release]
    drifted = sum(not one.holds for one in findings)
    if release is None:
        verdict = f"version {looked_at.version} is not in the table (patching/releases.py)"
    elif drifted or gone:
        verdict = f"{drifted} of {len(findings)} patch points drifted, {len(gone)} names are gone"
    elif mixed:
        verdict = f"{len(mixed)} patch points are those of another release than {release}"
    else:
        print(f"\nall {len(findings)} patch points hold: {release}")
        return 0
    print(f"\n{verdict}")
    return 1


def _installed() -> Path:
    """Return the folder that contains the installed ``megatron``.

    Raises:
        ValueError: if Megatron is not installed.
    """
    spec = importlib.util.find_spec("megatron")  # of a top-level name: nothing is imported
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / "core" / "package_info.py").is_file():
            return Path(folder).parent
    raise ValueError("no megatron-core is installed; name one with --known PATH")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
