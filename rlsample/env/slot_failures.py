"""The failures of envs that are stepped in this process: what each says, and of which slot and step."""

from __future__ import annotations

from rlsample.errors import EnvFailedError

__all__ = ["not_finite", "raised"]


def raised(slot: int, error: Exception, where: str, step: int | None = None) -> EnvFailedError:
    """For what an env's method ``where`` raised, which becomes the cause; an EnvFailedError stays as it is.

    Args:
        step: of the episode; None: no step was under way.
    """
    if isinstance(error, EnvFailedError):
        return error
    at = f"slot {slot}" if step is None else f"slot {slot}, episode step {step}"
    text = f"{at}: {where} raised {type(error).__name__}: {error}"
    failure = EnvFailedError(text, slot=slot, episode_step=step)
    failure.__cause__ = error
    return failure


def not_finite(slot: int, step: int, path: str, value: float) -> EnvFailedError:
    """For an observation that holds NaN or inf at ``path`` (empty: it is one array); step 0 is the reset."""
    where = f" at {path}" if path else ""
    at = f"slot {slot}, episode step {step}:" if step else f"slot {slot}: reset's"
    text = f"{at} observation{where} holds {value}; mend the env, or set allow_nonfinite=True"
    return EnvFailedError(text, slot=slot, episode_step=step or None)
