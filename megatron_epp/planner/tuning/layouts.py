"""Enumeration of the layouts (parallel degrees) of a job."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_epp.cost.catalogue.models import Model


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Parallel degrees of a job; tp * cp * pp * dp is the number of devices.

    ``ep`` is the number of devices over which a layer's experts are sharded; 0 stands for
    gcd(tp * cp, number of experts).
    """

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int = 0

    def __str__(self) -> str:
        degrees = f"tp {self.tp} cp {self.cp} pp {self.pp} dp {self.dp}"
        return f"{degrees} ep {self.ep}" if self.ep else degrees


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Parallel degrees that the user fixed; None: the degree is free.

    If ``ep`` is fixed, :func:`layouts` yields only layouts with ``ep`` 0. Its caller then uses the
    fixed value in place of 0.
    """

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None

    def allows(self, layout: Layout) -> bool:
        """Return whether a layout has the degrees that the user fixed."""
        named = (self.tp, self.cp, self.pp, self.dp)
        there = (layout.tp, layout.cp, layout.pp, layout.dp)
        return all(want in (None, has) for want, has in zip(named, there, strict=True))


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer in ascending order."""
    small = [degree for degree in range(1, int(number**0.5) + 1) if number % degree == 0]
    return sorted({*small, *(number // degree for degree in small)})


def layouts(
    model: Model, devices: int, node_devices: int, documents: int, wanted: JobRequest | None = None
) -> Iterator[Layout]:
    """Yield the layouts that Megatron accepts for ``documents`` documents in a global batch.

    Tensor parallelism stays inside a node; its degree tp divides the number of K/V heads and the
    FFN hidden size, and tp * cp divides the number of attention heads. Every stage has at least one
    layer, and all replicas have the same number of documents. Experts are sharded within a
    replica's stage (``ep`` 0). Unless the user fixed ``ep``, further layouts shard experts over r
    replicas, if r divides dp and ``ep`` = tp * cp * r divides the number of experts.

    Args:
        model: sizes of the model.
        devices: number of devices of the job.
        node_devices: number of devices of a node.
        documents: number of documents of a global batch.
        wanted: degrees that the user fixed; None leaves all free.
    """
    wanted = wanted or JobRequest()
    for tp in divisors(devices):
        if tp > node_devices or model.kv_heads % tp or model.ffn_hidden % tp:
            continue
        for cp in divisors(devices // tp):
            if model.heads % (tp * cp):
                continue
            rest = devices // (tp * cp)
            for pp in divisors(rest):
                dp = rest // pp
                if pp > model.layers or documents % dp:
                    continue
                layout = Layout(tp, cp, pp, dp)
                if not wanted.allows(layout):
                    continue
                yield layout
                of_replicas = divisors(dp)[1:] if wanted.ep is None else []
                for ep in (tp * cp * replicas for replicas in of_replicas):
                    if model.most_experts and model.most_experts % ep == 0:
                        yield replace(layout, ep=ep)
