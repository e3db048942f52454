"""Constants that FlexSP published for its GPT models on one A100.

They are milliseconds of forward plus backward of the full model. All-to-all rates are in
cost.catalogue.devices. Source: the code of FlexSP (arXiv 2412.01523).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedRates:
    """FlexSP's a1, a2 (InfiniPipe's eq. 1, on one device) and b1 (per chunk) of the full model."""

    a1_ms_per_square_token: float
    a2_ms_per_token: float
    b1_ms: float


PUBLISHED: Mapping[str, PublishedRates] = {
    "gpt-7b": PublishedRates(5.128e-6, 0.18396, 629.36),
    "gpt-13b": PublishedRates(9.2852e-6, 0.30602, 1132.56),
    "gpt-30b": PublishedRates(15.4262e-6, 0.80357, 2789.36),
}
