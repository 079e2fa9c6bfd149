"""The table of vendors: one row each. A new vendor is a new row.

Source: LMDeploy, pytorch/backends and docs/get_started, for device types; the vendors' installation guides for the rest.
"""

from dataclasses import dataclass

from sagellm.core.options import find_row

__all__ = ["VENDORS", "Vendor", "find_vendor"]

DLINFER = "https://github.com/DeepLink-org/dlinfer"


@dataclass(frozen=True, slots=True)
class Vendor:
    """Parts that make a vendor's devices work, and how to get them.

    Attributes:
        name: short name.
        title: name for people.
        nodes: pattern of the names in /dev of its devices.
        marks: paths of this vendor alone. A node that several rows name belongs to the row of which a path is there, else to
            the row without paths.
        libraries: of its driver and runtime, each as the linker names it; a version may follow.
        homes: folders that its installer puts libraries in; a `*` stands for a version.
        plugin: module that adds the device to torch; empty where torch itself is built for it.
        torch_build: pattern of a line in torch/version.py where torch itself is built for it.
        torch_device: type of its devices in torch.
        lmdeploy_device: the `--device` of LMDeploy; empty where LMDeploy has no back end for it.
        needs_dlinfer: whether that back end is one of dlinfer.
        collective: library of collectives.
        torch_backends: names of that library in torch.distributed; the first that is registered counts.
        get_runtime, get_torch, get_dlinfer: how to get each part.
        setup: command that makes the loader find the libraries.
    """

    name: str
    title: str
    nodes: str
    libraries: tuple[str, ...]
    homes: tuple[str, ...]
    torch_device: str
    collective: str
    torch_backends: tuple[str, ...]
    get_runtime: str
    get_torch: str
    plugin: str = ""
    torch_build: str = ""
    lmdeploy_device: str = ""
    needs_dlinfer: bool = False
    get_dlinfer: str = ""
    setup: str = ""
    marks: tuple[str, ...] = ()


VENDORS = (
    Vendor(
        name="nvidia", title="NVIDIA", nodes=r"nvidia\d+", libraries=("libcuda.so.1",), homes=("usr/lib/wsl/lib",),
        torch_build=r"^cuda\b.*= '", torch_device="cuda", lmdeploy_device="cuda", collective="nccl", torch_backends=("nccl",),
        get_runtime="install NVIDIA's driver", get_torch="./apply_patches.sh --cuda",
    ),
    Vendor(  # torch for ROCm keeps CUDA's names
        name="amd", title="AMD", nodes="kfd", libraries=("libamdhip64.so",), homes=("opt/rocm*/lib",),
        torch_build=r"^hip\b.*= '", torch_device="cuda", collective="rccl", torch_backends=("nccl",),
        get_runtime="install ROCm", get_torch="pip install torch --index-url https://download.pytorch.org/whl/rocm6.4",
    ),
    Vendor(
        name="ascend", title="Huawei Ascend", nodes=r"davinci\d+", libraries=("libascend_hal.so", "libascendcl.so"),
        homes=("usr/local/Ascend/driver/lib64/driver", "usr/local/Ascend/*/latest/lib64", "usr/local/Ascend/cann*/lib64"),
        plugin="torch_npu", torch_device="npu", lmdeploy_device="ascend", needs_dlinfer=True, collective="hccl",
        torch_backends=("hccl",), get_runtime="install the driver, the firmware and CANN of Ascend (hiascend.com)",
        get_torch="pip install torch_npu, in the version of torch", get_dlinfer="pip install dlinfer-ascend",
        setup="source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    Vendor(
        name="cambricon", title="Cambricon", nodes=r"cambricon_dev\d+", libraries=("libcnrt.so",),
        homes=("usr/local/neuware/lib64",), plugin="torch_mlu", torch_device="mlu", lmdeploy_device="camb", needs_dlinfer=True,
        collective="cncl", torch_backends=("cncl",), get_runtime="install Cambricon's driver and CNToolkit (sdk.cambricon.com)",
        get_torch="install torch_mlu of Cambricon's PyTorch image",
        get_dlinfer=f"build it with DEVICE=camb from {DLINFER}",
        setup="export LD_LIBRARY_PATH=/usr/local/neuware/lib64:$LD_LIBRARY_PATH",
    ),
    Vendor(  # answers as CUDA
        name="metax", title="MetaX", nodes=r"mxcd\d*", libraries=("libmcruntime.so",), homes=("opt/maca*/lib",),
        torch_build=r"^__version__ = .*metax", torch_device="cuda", lmdeploy_device="maca", needs_dlinfer=True,
        collective="mccl", torch_backends=("nccl",), get_runtime="install MetaX's driver and MACA (developer.metax-tech.com)",
        get_torch="install the torch of MetaX for MACA", get_dlinfer=f"build it with DEVICE=maca from {DLINFER}",
        setup="export LD_LIBRARY_PATH=/opt/maca/lib:$LD_LIBRARY_PATH",
    ),
    Vendor(
        name="hygon", title="Hygon", nodes="kfd|mkfd", marks=("dev/mkfd", "opt/dtk", "opt/hyhal"),
        libraries=("libgalaxyhip.so",), homes=("opt/dtk*/lib", "opt/dtk*/hip/lib"), torch_build=r"^hip\b.*= '",
        torch_device="cuda", collective="rccl", torch_backends=("nccl",),
        get_runtime="install Hygon's driver and DTK (developer.hpccube.com)", get_torch="install the torch of Hygon for DTK",
        setup="source /opt/dtk/env.sh",
    ),
    Vendor(  # answers as CUDA
        name="kunlun", title="Baidu Kunlunxin", nodes=r"xpu\d+", libraries=("libxpurt.so",),
        homes=("opt/xre*/so", "usr/local/xpu*/lib64"), plugin="torch_xmlir", torch_device="cuda", collective="bkcl",
        torch_backends=("kccl", "nccl"), get_runtime="install Kunlunxin's driver and XRE",
        get_torch="install torch_xmlir of Kunlunxin", setup="export LD_LIBRARY_PATH=/opt/xre/so:$LD_LIBRARY_PATH",
    ),
)  # fmt: skip


def find_vendor(name: str) -> Vendor:
    """Return the vendor of that name. Raises ConfigError: it is unknown."""
    return find_row(VENDORS, name, "vendor")
