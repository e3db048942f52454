"""Norms with a zero-centred weight, which torch's own have not: y = x / norm(x) * (1 + weight).

The weight begins at zero, and weight decay pulls the factor towards one. Checkpoints hold it as it
is, as Transformer Engine's with ``zero_centered_gamma`` do.
"""

from torch import Tensor, nn
from torch.nn import functional


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """torch's, but for the weight."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """torch's, but for the weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


ZERO_CENTERED: dict[type, type] = {
    nn.LayerNorm: ZeroCenteredLayerNorm,
    nn.RMSNorm: ZeroCenteredRMSNorm,
}
