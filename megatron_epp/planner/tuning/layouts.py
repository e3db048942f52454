"""Every way to divide the devices of a job."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_epp.cost.catalogue.models import Model


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Degrees whose product is the number of devices.

    ep: devices that share a layer's experts; 0: as many of tp * cp as divide them, or none.
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
    """Degrees that the user named; None: free. With an ``ep``, layouts leave theirs at 0."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None

    def allows(self, layout: Layout) -> bool:
        named = (self.tp, self.cp, self.pp, self.dp)
        there = (layout.tp, layout.cp, layout.pp, layout.dp)
        return all(want in (None, has) for want, has in zip(named, there, strict=True))


def divisors(number: int) -> list[int]:
    small = [degree for degree in range(1, int(number**0.5) + 1) if number % degree == 0]
    return sorted({*small, *(number // degree for degree in small)})


def layouts(
    model: Model, devices: int, node_devices: int, documents: int, wanted: JobRequest | None = None
) -> Iterator[Layout]:
    """Those that Megatron takes for ``documents`` in a global batch.

    Tensor parallelism stays inside a node and divides the groups of K and V; both it and context
    parallelism divide the heads; every stage has a layer; every replica gets as many documents.
    Experts are shared inside a replica's stage, and by each number of whole replicas that divides
    them.
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
