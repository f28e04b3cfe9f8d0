"""The GPUs that the gate compiles for: what the data sheets and the driver say of them, and XLA's view of each."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.gpu_gate.quiet import quiet_stderr


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU model. What differs between the three is here; what they share is in `target_config`."""

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    features: str
    """NONE, or ACCELERATED_FEATURES: the instructions of this architecture alone (sm_90a)."""
    num_cores: int
    lanes_per_core: int
    shared_memory_per_core: int
    shared_memory_limit: int
    """Bytes of shared memory that one thread block can have, static and dynamic together."""
    memory_bytes: int
    bytes_per_second: float
    """Bandwidth of the device memory, of the data sheet."""
    l2_bytes: int
    clock_ghz: float

    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {self.features} }}
              core_count: {self.num_cores}
              fpus_per_core: {self.lanes_per_core}
              clock_rate_ghz: {self.clock_ghz}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory_limit}
              shared_memory_per_core: {self.shared_memory_per_core}
              l2_cache_size: {self.l2_bytes}
              device_memory_size: {self.memory_bytes}
              memory_bandwidth: {round(self.bytes_per_second)}
              driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
            }}
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            platform_name: "CUDA"
            device_description_str: "{self.device_kind}"
        """


_HOPPER: dict[str, Any] = {
    "compute_capability": (9, 0),
    "features": "ACCELERATED_FEATURES",
    "num_cores": 132,
    "lanes_per_core": 128,
    "shared_memory_per_core": 228 * 1024,
    "shared_memory_limit": 227 * 1024,
    "l2_bytes": 50 * 2**20,
    "clock_ghz": 1.98,
}
CARDS = {
    card.name: card
    for card in (
        Card(
            name="A100",
            device_kind="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            features="NONE",
            num_cores=108,
            lanes_per_core=64,
            shared_memory_per_core=164 * 1024,
            shared_memory_limit=163 * 1024,
            memory_bytes=85_100_068_864,
            bytes_per_second=2.039e12,
            l2_bytes=40 * 2**20,
            clock_ghz=1.41,
        ),
        Card(
            name="H100",
            device_kind="NVIDIA H100 80GB HBM3",
            memory_bytes=84_942_979_072,
            bytes_per_second=3.352e12,
            **_HOPPER,
        ),
        Card(name="H200", device_kind="NVIDIA H200", memory_bytes=151_397_597_184, bytes_per_second=4.8e12, **_HOPPER),
    )
}


@cache
def device(card: Card) -> Any:
    """A jax device of this card, to compile for. Nothing can run on it."""
    with quiet_stderr():
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=card.target_config(), topology="1x1x1"
        )
    return topology.devices[0]


def targeting(card: Card) -> AbstractContextManager[Any]:
    """Around tracing and lowering: kernels ask there which GPU they are tuned for, and from jax 0.11 on Pallas too."""
    kind = AbstractDevice(device_kind=device(card).device_kind, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
