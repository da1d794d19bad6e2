"""Dense peak FLOP/s and memory of accelerators, from their vendors' data sheets. What is not listed is unknown.

``fp32`` is the plain vector rate, ``tf32`` the tensor cores' on fp32 inputs. Rates are without structured sparsity;
half the printed one where a sheet prints only the sparse. Consumer cards: 16-bit products accumulated in fp32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 2**30  # vendors' GB of device memory


@dataclass(frozen=True)
class Device:
    """One accelerator.

    ``memory_bytes`` is the nominal size; what a process can use is 1-2 % less, 6 % on cards with in-line ECC.
    """

    name: str  # as in plan.device
    pattern: str  # of the whole tidied device name
    memory_bytes: int
    peak_flops: dict[str, float]  # by precision
    source: str


def rates(**tera: float) -> dict[str, float]:
    return {precision: value * 1e12 for precision, value in tera.items()}


HOPPER = rates(fp8=1979, bf16=989.5, fp16=989.5, tf32=494.7, fp32=67)
AMPERE = rates(bf16=312, fp16=312, tf32=156, fp32=19.5)
VOLTA_SXM = rates(fp16=125, fp32=15.7)
VOLTA_PCIE = rates(fp16=112, fp32=14)

DEVICES = (
    Device("b200", r"b200", 180 * GIB, rates(bf16=2250, fp16=2250, tf32=1125, fp8=4500), "NVIDIA HGX B200 data sheet"),
    Device("h200", r"h200(-sxm5?)?(-141gb?)?(-hbm3e)?", 141 * GIB, HOPPER, "NVIDIA H200 data sheet, SXM"),
    Device("h100", r"h100(-sxm5?)?(-80gb?)?(-hbm3)?(-sxm5?)?", 80 * GIB, HOPPER, "NVIDIA H100 data sheet, SXM"),
    Device(
        "h100-pcie",
        r"h100(-80gb?)?-pcie(-80gb?)?",
        80 * GIB,
        rates(fp8=1513, bf16=756, fp16=756, tf32=378, fp32=51),
        "NVIDIA H100 data sheet, PCIe",
    ),
    Device("a100-80g", r"a100(-(sxm4?|pcie))?-80gb?(-pcie)?", 80 * GIB, AMPERE, "NVIDIA A100 data sheet"),
    Device("a100-40g", r"a100((-(sxm4?|pcie))?-40gb?(-pcie)?)?", 40 * GIB, AMPERE, "NVIDIA A100 data sheet"),
    Device("v100-32g", r"v100(-sxm[23]?)?-32gb?", 32 * GIB, VOLTA_SXM, "NVIDIA V100 data sheet, SXM2"),
    Device("v100-16g", r"v100(-sxm2?)?(-16gb?)?", 16 * GIB, VOLTA_SXM, "NVIDIA V100 data sheet, SXM2"),
    Device("v100-pcie-32g", r"v100-pcie-32gb?", 32 * GIB, VOLTA_PCIE, "NVIDIA V100 data sheet, PCIe"),
    Device("v100-pcie-16g", r"v100-pcie-16gb?", 16 * GIB, VOLTA_PCIE, "NVIDIA V100 data sheet, PCIe"),
    Device(
        "l40s",
        r"l40s(-48gb?)?",
        48 * GIB,
        rates(fp8=733, bf16=362.05, fp16=362.05, tf32=183, fp32=91.6),
        "NVIDIA L40S data sheet",
    ),
    Device("l4", r"l4(-24gb?)?", 24 * GIB, rates(bf16=121, fp16=121, tf32=60, fp32=30.3), "NVIDIA L4 data sheet"),
    Device("a10", r"a10(-24gb?)?", 24 * GIB, rates(bf16=125, fp16=125, tf32=62.5, fp32=31.2), "NVIDIA A10 data sheet"),
    Device("t4", r"t4(-16gb?)?", 16 * GIB, rates(fp16=65, fp32=8.1), "NVIDIA T4 data sheet"),
    Device(
        "rtx4090",
        r"rtx-?4090(-24gb?)?",
        24 * GIB,
        rates(bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6),
        "NVIDIA Ada GPU architecture white paper, appendix A",
    ),
    Device(
        "rtx3090",
        r"rtx-?3090(-24gb?)?",
        24 * GIB,
        rates(bf16=71, fp16=71, tf32=35.6, fp32=35.6),
        "NVIDIA Ampere GA102 white paper, table 9",
    ),
    Device(
        "mi300x",
        r"mi300x(-oam)?(-192gb?)?",
        192 * GIB,
        rates(fp8=2614.9, bf16=1307.4, fp16=1307.4, tf32=653.7, fp32=163.4),
        "AMD Instinct MI300X data sheet",
    ),
)


def find_device(name: str) -> Device | None:
    """The device of a short name (``h200``, ``a100-80g``) or of ``torch.cuda.get_device_name()``; else ``None``.

    A bare ``a100`` or ``v100`` is the first and smaller of its kind. Names are matched whole, so that a slice (MIG), a laptop or an export variant is unknown, not mistaken.
    """
    tidy = re.sub(r"[\s_-]+", "-", name.strip().lower())
    tidy = re.sub(r"^((nvidia|amd|tesla|geforce|instinct)-)+", "", tidy)
    return next((device for device in DEVICES if re.fullmatch(device.pattern, tidy)), None)


def peak_flops(name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of a device in ``fp8``, ``bf16``, ``fp16``, ``tf32`` or ``fp32``; ``None`` if unknown."""
    device = find_device(name)
    return device.peak_flops.get(precision) if device is not None else None


def memory_bytes(name: str) -> int | None:
    """Nominal memory of a device in bytes; ``None`` if the device is unknown."""
    device = find_device(name)
    return device.memory_bytes if device is not None else None


def device_names() -> list[str]:
    """Short names of the devices that are known."""
    return [device.name for device in DEVICES]
