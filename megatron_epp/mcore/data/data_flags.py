"""Parser of Megatron's data flags, with one-line errors."""

import math
from typing import Any

Blend = tuple[list[str], list[float] | None]  # prefixes, and a weight for each or None

_BLEND_FLAGS = ("data_path", "data_args_path")
_SPLIT_FLAGS = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")


def blends_of(args: Any) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return the blend of --data-path, and the blends of training, validation and test.

    A blend is a list of corpora, and a list of their weights or None. As in Megatron, at least one
    of the two results is None.

    Raises:
        ValueError: --data-path and --data-args-path are both given, a file cannot be read, a blend
            names no corpus, only some corpora have a weight, or a weight is invalid.
    """
    # Imported here, because documents can also be read without Megatron's trainer.
    from megatron.training.utils import get_blend_and_blend_per_split

    where = _where(args)
    if args.data_path is not None and args.data_args_path is not None:
        raise ValueError(f"{where}: both are given; expected one of them")
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror})") from error
    except AssertionError as error:
        raise ValueError(
            f"{where}: some corpora have a weight and others none; expected `WEIGHT PREFIX` for "
            "each, or prefixes alone"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: names no corpora ({type(error).__name__}: {error}); expected `PREFIX`, or "
            "`WEIGHT PREFIX` for each; in --per-split-data-args-path a JSON object of such texts "
            "(or null) for train, valid and test"
        ) from error
    for prefixes, weights in filter(None, (blend, *(per_split or ()))):
        if not all(isinstance(prefix, str) for prefix in prefixes):
            raise ValueError(f"{where}: expected texts that name corpora, got {prefixes!r:.200}")
        for prefix, weight in zip(prefixes, weights or (), strict=False):
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"{where}: weight {weight:g} of {prefix}; expected a positive number; leave "
                    "out a corpus that is not to be read"
                )
    return blend, per_split


def require_data_flags(args: Any) -> None:
    """Raise a ValueError for data flags on which an assertion of Megatron would later fail."""
    blend, per_split = blends_of(args)
    if blend is None and per_split is not None and args.split is not None:
        raise ValueError(
            f"--split {args.split}: divides --data-path; with {_where(args)} leave it out"
        )
    if blend is not None:
        _require_split(args)
    of_validation = blend if per_split is None else per_split[1]
    if args.full_validation and of_validation is not None and of_validation[1] is not None:
        raise ValueError(
            f"--full-validation: {_where(args)} gives weights to what validation reads whole; "
            "leave them out, as with --train-data-path, --valid-data-path and --test-data-path"
        )
    names, sets = args.validation_set_names, args.multiple_validation_sets
    if names and not sets:
        raise ValueError(
            f"--validation-set-names {' '.join(names)}: names the sets of "
            "--multiple-validation-sets, which is not given; give both, or neither"
        )
    if names and of_validation is not None and len(names) != len(of_validation[0]):
        raise ValueError(
            f"--validation-set-names {' '.join(names)}: {len(names)} names of "
            f"{len(of_validation[0])} corpora for validation; expected a name for each"
        )


def _require_split(args: Any) -> None:
    """Raise a ValueError unless Megatron can read --split as fractions."""
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

    expected = "expected fractions for training, validation and test, as 99,1,0"
    if args.split is None:
        raise ValueError(f"--split is missing with {_where(args)}; {expected}")
    try:
        total = sum(parse_and_normalize_split(args.split))
    except (AssertionError, ArithmeticError, ValueError) as error:
        raise ValueError(f"--split {args.split!r:.80}: {expected}") from error
    if not math.isfinite(total):
        raise ValueError(f"--split {args.split!r:.80}: {expected}")


def _where(args: Any) -> str:
    """Return the names of the data flags in use, and the values of --*-data-args-path."""
    named = [name for name in (*_BLEND_FLAGS, *_SPLIT_FLAGS) if getattr(args, name) is not None]
    return " and ".join(
        f"--{name.replace('_', '-')}" + (f" {getattr(args, name)}" if "args" in name else "")
        for name in named
    )
