"""Published facts of Apple GPUs and published speeds, each with its source, and the few assumptions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """An Apple GPU with a certain number of cores.

    Attributes:
        bandwidth: bytes per second that Apple states.
        clock: Hz.
        last_level: bytes of the system level cache.
        kind: last letter of the architecture's name, by which MLX chooses a kernel.
    """

    name: str
    cores: int
    bandwidth: float
    clock: float
    last_level: float = 0
    kind: str = "g"


CHIPS = (
    Chip("M1", 8, 68.25e9, 1.278e9, 8e6),
    Chip("M2", 10, 102.4e9, 1.398e9, 8e6),
    Chip("M4 Max", 40, 546e9, 1.678e9, 48e6, "s"),
    Chip("M3 Ultra", 80, 819e9, 1.398e9, 96e6, "d"),
)

BENCHMARKS = "[metal-benchmarks](https://github.com/philipturner/metal-benchmarks)"
# Schedulers of a core. Each issues one instruction of a SIMD group per cycle.
SCHEDULERS = 4
# Cycles of a scheduler for an instruction. All other instructions take 1.
CYCLES = {
    "imul": 4, "imadd": 4, "shl": 4, "shr": 4, "exp2": 4, "log2": 4, "f_to_u32": 4, "f_to_s32": 4, "rcp": 6,
    "rsqrt": 8, "shuffle": 2,
}  # fmt: skip
PRODUCT_CYCLES = 18  # cycles of a product of 8 x 8 matrices with float32 sums
SUM_CYCLES = 14.5  # cycles of a simd_sum
# (SIMD groups on a core, the core's issue rate as a share of its peak), for float32 code with four independent
# instructions at a time.
ISSUE_RATES = ((0, 0.0), (4, 1 / 2.75), (8, 1 / 1.60), (24, 1 / 1.02))
CACHE_BYTES = 32  # bytes per core and cycle from the cache that cores share
CORE_BYTES = 64  # bytes per core and cycle into a core
LAST_LEVEL_RATE = 2  # bandwidth of the system level cache, in bandwidths of the memory
BANDWIDTH_SHARE = 0.87  # share of the stated bandwidth that a long read attains
PRODUCT_SHARE = 0.80  # share of the peak that large products attain
DISPATCH = 2.05e-6  # seconds between dependent launches
LAUNCHES = 15  # launches of a layer, attention excluded
LATENCY = 400e-9  # seconds from a load to its value: an assumption
THREADGROUP_MEMORY = 60 << 10  # bytes per core

FACTS = (
    ("bandwidth", "68.25 GB/s (M1), 102.4 (M2), 546 (M4 Max), 819 (M3 Ultra)", "Apple's specifications, collected in "
     "[one](https://gist.github.com/kellyshephard), [two](https://goodnewsapodcast.com/apples-m4-m4-pro-and-m4-max-"
     "compared-to-past-generations-and-to-each-other) and [three](https://github.com/youssofal/MTPLX/issues/64)"),
    ("cores", "8, 10, 40 and 80: the most of each chip", "the same, and " + BENCHMARKS),
    ("clock", "1.278 GHz (M1), 1.398 GHz (M2)", BENCHMARKS),
    ("clock", "1.678 GHz (M4 Max), 1.398 GHz (M3 Ultra, as M3 Max)", "[a database](https://hmc-tech.com/gpu/apple-32-"
     "core-m4-max-vs-apple-40-core-m3-max); 18.4 TFLOPS, as [others](https://github.com/huggingface/huggingface.js/pull/"
     "1044) state for M4 Max, would be 1.8 GHz"),
    ("issue rate", "4 instructions per core and cycle; cycles of an instruction; share by SIMD groups on a core",
     BENCHMARKS + ", measured on M1"),
    ("products of 8 x 8 matrices", "18 cycles", BENCHMARKS),
    ("shared cache, path into a core, system level cache", "32 and 64 bytes per core and cycle; twice the memory's "
     "bandwidth", BENCHMARKS + "; threadgroup memory shares the path, an assumption"),
    ("system level cache", "8, 8, 48 and 96 MB", BENCHMARKS + " for M1 and M2; M4 Max and M3 Ultra as M1 Max and M1 "
     "Ultra, an assumption"),
    ("attained bandwidth", "87%", "680 of 800 GB/s on M1 Ultra ([MLX 3837](https://github.com/ml-explore/mlx/issues/"
     "3837)), 350 to 380 of 400 on M2 Max ([MLX 1597](https://github.com/ml-explore/mlx/pull/1597)), 386 of 400 on M3 "
     "Max ([clpeak](https://gist.github.com/jasondavies/d45e3fafd5440a22705a2318d570e9de))"),
    ("attained products", "80% of the peak", "102 of 128 per core and cycle in " + BENCHMARKS + "; 18.9 TFLOP/s on 60 "
     "cores of M3 Ultra, 88% ([MLX 3196](https://github.com/ml-explore/mlx/issues/3196))"),
    ("dependent launches", "2.05 µs each", "[a measurement](https://github.com/penta2himajin/qwisp/issues/143); "
     "[another](https://github.com/kryptic-sh/infr/pull/14) has 1.3 µs"),
    ("launches", "15 of a layer", "[242 for 16 layers](https://github.com/antonellof/ferrox/pull/156)"),
    ("latency of a load", "400 ns", "an assumption"),
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Sizes that a step's time depends on.

    ``weights`` is the number of weights of the layers, and ``head`` the number of weights of the LM head.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weights: float
    head: float


LLAMA_8B = Model("Llama-3-8B", 32, 32, 8, 128, 6.98e9, 0.525e9)
LLAMA_7B = Model("Llama-2-7B", 32, 32, 32, 128, 6.48e9, 0.131e9)
QWEN_4B = Model("Qwen3-4B", 36, 32, 8, 128, 3.63e9, 0.389e9)


@dataclass(frozen=True)
class Published:
    """A published speed in tokens per second. ``tokens``: length of the prompt, or of a decode's context."""

    chip: Chip
    model: Model
    bits: float  # bits per weight, including scales
    is_prompt: bool
    tokens: int
    speed: float
    engine: str
    source: str


_M1_PRO = Chip("M1 Pro, 14 cores", 14, 200e9, 1.296e9, kind="s")
_M2_PRO = Chip("M2 Pro, 19 cores", 19, 200e9, 1.398e9, kind="s")
_M3_PRO = Chip("M3 Pro, 18 cores", 18, 150e9, 1.398e9, kind="s")
_M3_ULTRA_60 = Chip("M3 Ultra, 60 cores", 60, 819e9, 1.398e9, kind="d")
_GIST = "https://gist.github.com/andrewginns/cf95867c2d79458bd894c07b9e7d5cbd"
_MLX_GIST = "https://gist.github.com/awni/c1790e4c3a39be6e8f1c4afd42423d2d"
_RAPID = "https://github.com/raullenchai/Rapid-MLX/pull/586"
_OLD = "https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference/issues/1"
PUBLISHED = (
    Published(_M1_PRO, LLAMA_7B, 16, False, 64, 12.75, "llama.cpp", _GIST),
    Published(_M2_PRO, LLAMA_7B, 16, False, 64, 10.85, "llama.cpp, August 2023", _OLD),
    Published(_M3_PRO, LLAMA_7B, 16, False, 64, 9.89, "llama.cpp", _GIST),
    Published(CHIPS[2], QWEN_4B, 16, False, 2112, 52.47, "mlx-lm", _MLX_GIST),
    Published(_M3_ULTRA_60, LLAMA_8B, 4.5, False, 576, 119.39, "MLX, Rapid-MLX", _RAPID),
    Published(_M3_ULTRA_60, LLAMA_8B, 4.5, False, 2304, 110.45, "MLX, Rapid-MLX", _RAPID),
    Published(_M1_PRO, LLAMA_7B, 16, True, 512, 262.65, "llama.cpp", _GIST),
    Published(_M3_PRO, LLAMA_7B, 16, True, 512, 357.45, "llama.cpp", _GIST),
    Published(CHIPS[2], QWEN_4B, 16, True, 2048, 1780.63, "mlx-lm", _MLX_GIST),
)
