"""Registry of the objects that adapt certificates to layer kinds."""

from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.dsa.certificate import DSACertificate
from megatron_epp.mcore.kinds.mla.certificate import MLACertificate
from megatron_epp.mcore.kinds.moe.certificate import MoECertificate
from megatron_epp.mcore.kinds.mtp.certificate import MTPCertificate
from megatron_epp.mcore.kinds.ssm.certificate import GatedDeltaNetCertificate, MambaCertificate
from megatron_epp.mcore.kinds.window.certificate import WindowCertificate

LAYER_CERTIFICATES: tuple[LayerCertificate, ...] = (
    MLACertificate(),
    DSACertificate(),
    MambaCertificate(),
    GatedDeltaNetCertificate(),
    MoECertificate(),
    WindowCertificate(),
    MTPCertificate(),
)
