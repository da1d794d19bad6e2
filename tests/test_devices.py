import pytest

from harness.measure import devices


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("a100", "a100-40g"),
        ("A100_80G", "a100-80g"),
    ],
)
def test_devices_are_found_by_the_names_torch_reports(name, short):
    device = devices.find_device(name)
    assert device is not None and device.name == short


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA H800",
        "cpu",
        "",
    ],
)
def test_unknown_and_lookalike_devices_have_no_peak(name):
    assert devices.find_device(name) is None
    assert devices.peak_flops(name, "bf16") is None
    assert devices.memory_bytes(name) is None


def test_every_short_name_finds_its_own_device():
    for device in devices.DEVICES:
        assert devices.find_device(device.name) is device


def test_peaks_are_dense_and_by_precision():
    assert devices.peak_flops("h100", "bf16") == 989.5e12
    assert devices.peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert devices.peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert devices.peak_flops("v100-16g", "bf16") is None
    assert devices.memory_bytes("h200") == 141 * 2**30
