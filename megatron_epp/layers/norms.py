"""LayerNorm and RMSNorm that scale by 1 + weight (zero-centred weight), which torch lacks.

The weight is initialised to zero. Weight decay pulls it towards zero, and thus the scale towards 1.
Checkpoints store the weight like Transformer Engine's norms with ``zero_centered_gamma``.
"""

from torch import Tensor, nn
from torch.nn import functional


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """torch's LayerNorm with a zero-centred weight."""

    def reset_parameters(self) -> None:
        """Initialise the weight to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` and scale it by 1 + weight."""
        return functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """torch's RMSNorm with a zero-centred weight."""

    def reset_parameters(self) -> None:
        """Initialise the weight to zero."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` and scale it by 1 + weight."""
        return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


ZERO_CENTERED: dict[type, type] = {
    nn.LayerNorm: ZeroCenteredLayerNorm,
    nn.RMSNorm: ZeroCenteredRMSNorm,
}
