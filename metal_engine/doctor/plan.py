"""Plan of the full report: its sections, and the sizes of its measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    """A group of measurements that runs in a process of its own.

    Attributes:
        name: heading in the report.
        module: module in ``metal_engine.doctor.sections`` with a function ``measure(plan, model)``, which yields facts
            and figures.
        seconds: time limit in seconds.
        has_model: True if the section is repeated for each model.
    """

    name: str
    module: str
    seconds: float
    has_model: bool = True


# Sections without a model run first. The others run for each model.
SECTIONS = (
    Section("Machine", "machine", 60, has_model=False),
    Section("Attention", "attention", 90, has_model=False),
    Section("Recurrent layers", "recurrences", 90, has_model=False),
    Section("Kernels", "kernels", 180),
    Section("Chats", "generation", 180),
    Section("Ways to run a step", "steps", 90),
    Section("Memory", "memory", 90),
    Section("Preemption", "preemption", 60),
    Section("Restart with stored KV", "restart", 60),
    Section("Sustained load", "sustained", 120),
)


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements. Lengths are in tokens. The defaults are for a Mac and take about ten minutes.

    Attributes:
        seconds: time limit of the report in seconds for each model. For the first model, it includes the sections
            without a model.
        batches: numbers of concurrent requests.
        prompt_tokens: length of each prompt.
        output_tokens: length of each output.
        long_prompts: lengths of the prompts whose time to first token is measured.
        attention_steps: (requests, new tokens of each, keys of each) of the attention measurements.
        recurrent_steps: (requests, new tokens of each) of the measurements of recurrent layers.
        repeats: repetitions of a measurement of a layer.
        decode_steps: number of decode steps for each way to run a step.
        sustained_seconds: duration of the sustained load.
        kv_cache_bytes: size of the KV cache in bytes; None for the engine's default.
        simulator: module with a function ``metal_kernel``, which runs the kernels on machines without Metal. An empty
            name leaves them out.
    """

    seconds: float = 600.0
    batches: tuple[int, ...] = (1, 4, 8, 16)
    prompt_tokens: int = 128
    output_tokens: int = 128
    long_prompts: tuple[int, ...] = (2000, 8000)
    attention_steps: tuple[tuple[int, int, int], ...] = (
        (1, 1, 1024),
        (1, 1, 16_384),
        (16, 1, 1024),
        (64, 1, 1024),
        (1, 512, 512),
        (1, 2048, 2048),
    )
    recurrent_steps: tuple[tuple[int, int], ...] = ((1, 1), (16, 1), (1, 512), (1, 2048))
    repeats: int = 20
    decode_steps: int = 96
    sustained_seconds: float = 60.0
    kv_cache_bytes: int | None = None
    simulator: str = ""

    @classmethod
    def short(cls, simulator: str = "") -> Plan:
        """Return the plan for machines without Metal. It runs every measurement with small sizes."""
        return cls(
            batches=(1, 3),
            prompt_tokens=24,
            output_tokens=8,
            long_prompts=(48,),
            attention_steps=((1, 1, 64), (3, 1, 64), (1, 32, 32)),
            recurrent_steps=((2, 1), (1, 32)),
            repeats=2,
            decode_steps=8,
            sustained_seconds=1.0,
            kv_cache_bytes=64 << 20,
            simulator=simulator,
        )

    @classmethod
    def virtual(cls) -> Plan:
        """Return a shorter plan for virtual Macs, because their GPUs are slow."""
        return cls(
            seconds=300.0,
            output_tokens=32,
            long_prompts=(2000,),
            repeats=5,
            decode_steps=24,
            sustained_seconds=10.0,
            kv_cache_bytes=1 << 30,
        )

    @classmethod
    def of(cls, values: dict[str, Any]) -> Plan:
        """Return the plan whose fields are ``values``, as :func:`dataclasses.asdict` and JSON give them."""
        return cls(**{name: _with_tuples(value) for name, value in values.items()})


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value
