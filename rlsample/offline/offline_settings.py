"""Options about logs: what is recorded, and what is learnt from in place of the env."""

from __future__ import annotations

from dataclasses import dataclass

from rlsample.errors import ConfigError, unknown_name
from rlsample.offline.array_codec import MAX_FRAGMENT_SIZE
from rlsample.offline.estimators import ESTIMATORS
from rlsample.offline.log_writer import FORMATS
from rlsample.settings import option

__all__ = ["SAMPLER", "OfflineSettings", "parse_input"]

SAMPLER = "sampler"


@dataclass(frozen=True)
class OfflineSettings:
    """Options of :mod:`rlsample.offline` in a run; docs/offline.md shows them at work."""

    input: str | None = option(
        None,
        "learn from logs, without stepping the env: a folder, file, pattern or minari:ID; or several with shares, "
        "such as A=0.7,B=0.3; the source sampler stands for the env",
    )
    input_shuffle_window: int = option(0, "draw each fragment from that many read ahead, files in random order; 0: no")
    input_max_fragment_size: int = option(
        MAX_FRAGMENT_SIZE, "bytes that one fragment of the logs may unpack to; a larger one is skipped"
    )
    input_evaluation: tuple[str, ...] = option((), "estimate the policy's return from the logs: is, wis")
    input_evaluation_episodes: int = option(100, "whole episodes kept for that, the first of the logs")
    input_evaluation_interval: int = option(10, "iterations from one estimate to the next")
    output: str | None = option(None, "write each sampled batch into this folder; several runs may share it")
    output_format: str = option("jsonl", "jsonl, or parquet (needs rlsample[offline])")
    output_max_file_size: int = option(64 << 20, "bytes after which a file is finished and the next begun")

    def __post_init__(self) -> None:
        if self.output_format not in FORMATS:
            raise unknown_name("output_format", self.output_format, FORMATS)
        for name in self.input_evaluation:
            if name not in ESTIMATORS:
                raise unknown_name("input_evaluation", name, ESTIMATORS)
        for name, least in (
            ("input_shuffle_window", 0),
            ("input_max_fragment_size", 1),
            ("input_evaluation_episodes", 2),
            ("input_evaluation_interval", 1),
            ("output_max_file_size", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        sources = [] if self.input is None else parse_input(self.input)
        if self.input_evaluation and not [source for source, _ in sources if source != SAMPLER]:
            raise ConfigError("input_evaluation estimates from logs: set input")
        if self.input is not None and self.output is not None and not self.samples:
            raise ConfigError("output records sampled batches, but with this input nothing is sampled; leave one out")

    @property
    def samples(self) -> bool:
        """Whether the env is stepped."""
        return self.input is None or any(source == SAMPLER for source, _ in parse_input(self.input))


def parse_input(text: str) -> list[tuple[str, float]]:
    """The sources of an ``input`` and their probabilities: ``"logs"`` or ``"a=0.7,b=0.2,sampler=0.1"``.

    Raises:
        ConfigError: a share that is no positive number, or shares that do not sum to 1.
    """
    if "=" not in text:
        return [(text, 1.0)]
    sources = []
    for part in text.split(","):
        source, _, share = part.rpartition("=")
        try:
            sources.append((source.strip(), float(share)))
        except ValueError:
            raise ConfigError(f"input {part.strip()!r}: expected SOURCE=SHARE, such as logs=0.7") from None
    total = sum(share for _, share in sources)
    if not all(source and share > 0 for source, share in sources) or abs(total - 1) > 1e-9:
        raise ConfigError(f"input {text!r}: the shares must be positive and sum to 1; they sum to {total:g}")
    return sources
