"""PagedAttention as a JAX engine: `pagedjax.generate`, `pagedjax.LLM`, `pagedjax.load`, `pagedjax.save`.

Names load on first use, so that `import pagedjax` is instant and the host side never imports jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax import functional as functional
    from pagedjax.beams.params import BeamSearchParams as BeamSearchParams
    from pagedjax.blocks.allocator import BlockAllocator as BlockAllocator
    from pagedjax.blocks.memory_map import BlockInfo as BlockInfo
    from pagedjax.blocks.memory_map import MemoryMap as MemoryMap
    from pagedjax.blocks.table import BlockTable as BlockTable
    from pagedjax.blocks.table import UseAfterFreeError as UseAfterFreeError
    from pagedjax.config import EngineConfig as EngineConfig
    from pagedjax.engine import LLMEngine as LLMEngine
    from pagedjax.llm import LLM as LLM
    from pagedjax.llm import generate as generate
    from pagedjax.models.load import load as load
    from pagedjax.models.orbax_checkpoint import save as save
    from pagedjax.outputs import CompletionOutput as CompletionOutput
    from pagedjax.outputs import EngineStats as EngineStats
    from pagedjax.outputs import Logprob as Logprob
    from pagedjax.outputs import RequestOutput as RequestOutput
    from pagedjax.outputs import ScoreOutput as ScoreOutput
    from pagedjax.planning.plan import MemoryPlan as MemoryPlan
    from pagedjax.sampling.params import SamplingParams as SamplingParams
    from pagedjax.sampling.processors import LogitsProcessor as LogitsProcessor
    from pagedjax.scheduling.request import FinishReason as FinishReason
    from pagedjax.scheduling.sequences import Sequence as Sequence
    from pagedjax.simulation.cost import StepCost as StepCost
    from pagedjax.simulation.cost import StepLoad as StepLoad
    from pagedjax.simulation.results import SimulationResult as SimulationResult
    from pagedjax.simulation.simulator import simulate as simulate
    from pagedjax.simulation.workload import SimulatedRequest as SimulatedRequest
    from pagedjax.simulation.workload import poisson_requests as poisson_requests

_HOMES = {
    "LLM": "llm",
    "generate": "llm",
    "load": "models.load",
    "save": "models.orbax_checkpoint",
    "LLMEngine": "engine",
    "EngineConfig": "config",
    "SamplingParams": "sampling.params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EngineStats": "outputs",
    "LogitsProcessor": "sampling.processors",
    "Logprob": "outputs",
    "ScoreOutput": "outputs",
    "BeamSearchParams": "beams.params",
    "Sequence": "scheduling.sequences",
    "UseAfterFreeError": "blocks.table",
    "BlockAllocator": "blocks.allocator",
    "BlockTable": "blocks.table",
    "MemoryMap": "blocks.memory_map",
    "MemoryPlan": "planning.plan",
    "BlockInfo": "blocks.memory_map",
    "FinishReason": "scheduling.request",
    "simulate": "simulation.simulator",
    "SimulatedRequest": "simulation.workload",
    "poisson_requests": "simulation.workload",
    "StepCost": "simulation.cost",
    "StepLoad": "simulation.cost",
    "SimulationResult": "simulation.results",
}

__version__ = "0.1.0"
__all__ = [*_HOMES, "functional", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "functional":
        return import_module("pagedjax.functional")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pagedjax.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
