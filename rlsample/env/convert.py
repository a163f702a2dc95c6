"""``as_base_env``: the one place that knows every kind of environment."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from rlsample.env.base_env import BaseEnv, EnvContext
from rlsample.env.env_settings import EnvSettings
from rlsample.env.envpool_env import EnvPoolLike
from rlsample.env.foreign_kinds import adapter_of, in_gymnasium_terms
from rlsample.env.gym_envs import GymEnvs
from rlsample.env.serving import ServingEnv, ServingEnvAdapter
from rlsample.env.vector_env import VectorEnv
from rlsample.errors import ConfigError, EnvFailedError, unknown_name
from rlsample.settings import from_options

__all__ = ["as_base_env"]

_log = logging.getLogger("rlsample")
_NATIVE_FROM = 8  # slots from which a vector form is faster than the loop
_MANY = (BaseEnv, VectorEnv, GymnasiumVectorEnv, ServingEnv, EnvPoolLike)
_ATARI = "atari:"

Make = Callable[[EnvContext], Any]


def as_base_env(
    env: Any,
    num_envs: int = 1,
    *,
    settings: EnvSettings | None = None,
    seed: int | None = None,
    worker_index: int = 0,
    **options: Any,
) -> BaseEnv:
    """Any kind of environment as a :class:`~rlsample.env.base_env.BaseEnv` of ``num_envs`` slots.

    Args:
        env: one of

            * a Gymnasium id (``"CartPole-v1"``, ``"module:Env-v0"``) or ``EnvSpec``;
            * ``"atari:Pong-v5"``: :func:`~rlsample.env.atari.make_atari` with ``env_config`` as its options (the plain
              id ``"ALE/Pong-v5"`` is Gymnasium's env: RGB frames, sticky actions, no preprocessing);
            * a ``gymnasium.Env`` class, or a factory: a callable that takes an ``EnvContext`` or nothing. It is called
              once per slot, and may also return a VectorEnv or BaseEnv (called once then);
            * a ``gymnasium.Env`` object, which becomes slot 0; further slots need an object that knows its spec;
            * a :class:`~rlsample.env.vector_env.VectorEnv`, ``gymnasium.vector.VectorEnv``, EnvPool object or BaseEnv
              (returned as it is); ``num_envs`` is then theirs, and may be left at 1;
            * a ``dm_env.Environment``: an object, a class, or what a factory returns;
            * a :class:`~rlsample.env.ServingEnv`: its slots are its ``max_concurrent``, and ``num_envs`` says for how
              many of them a sampler counts a batch.
        num_envs: slots.
        settings: see :class:`~rlsample.env.env_settings.EnvSettings`.
        seed: each slot's first reset is seeded by :func:`~rlsample.env.base_env.slot_seed`; None: unseeded. A BaseEnv
            keeps the seed it was made with.
        worker_index: the evaluator's index, for seeds and factories.
        options: single fields of ``settings``, which they override.

    Raises:
        ConfigError: an unknown id or option (the nearest is named), or a combination that cannot work.
        EnvFailedError: a sub-env's constructor raised; names the slot. Those built before are closed.
        SpaceError: a space of no fixed size.
    """
    settings = _merged(settings, options)
    if not _is_count(num_envs):
        raise ConfigError(f"num_envs must be an int of at least 1, got {num_envs!r}")
    seeding: dict[str, Any] = {"seed": seed, "worker_index": worker_index}
    if isinstance(env, str) and env.startswith(_ATARI):
        return _atari(env.removeprefix(_ATARI), num_envs, settings, seeding)
    return _converted(in_gymnasium_terms(env), num_envs, settings, seeding)


def _converted(env: Any, num_envs: int, settings: EnvSettings, seeding: dict[str, Any]) -> BaseEnv:
    if settings.backend == "process":
        return _in_workers(env, int(num_envs), settings, seeding)
    if isinstance(env, _MANY):
        return _many(env, num_envs, settings, seeding)
    if isinstance(env, (str, EnvSpec)):
        return _from_spec(_find_spec(env), num_envs, settings, seeding)
    if settings.vectorize == "native":
        raise ConfigError(f"vectorize='native' needs a Gymnasium id or spec with a vector form, got {_name(env)}")
    if isinstance(env, gymnasium.Env):
        make = _make_from_instance(env, num_envs, settings)
    elif isinstance(env, type):
        make = _make_from_class(env)
    elif _from_old_gym(env):
        raise _old_gym(env)
    elif callable(env):
        made, make = _call_once(_make_from_factory(env), num_envs, settings, seeding["worker_index"])
        if isinstance(made, _MANY):
            return _many(made, num_envs, dataclasses.replace(settings, env_config={}), seeding)
    else:
        raise _unknown_kind(env)
    return GymEnvs(make, int(num_envs), settings=settings, **seeding)


def _unknown_kind(env: Any) -> ConfigError:
    if hasattr(env, "step") and hasattr(env, "reset"):
        return ConfigError(
            f"{_name(env)} has step and reset but is no gymnasium.Env; subclass gymnasium.Env, or wrap it with Shimmy "
            "(pip install shimmy)"
        )
    return ConfigError(
        f"cannot make an env of {_name(env)}; give a Gymnasium id, a spec, a gymnasium.Env or VectorEnv (object, "
        "class or factory), or a BaseEnv"
    )


def _merged(settings: EnvSettings | None, options: dict[str, Any]) -> EnvSettings:
    if settings is None:
        return from_options(EnvSettings, options)
    if not options:
        return settings
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    return from_options(EnvSettings, {**fields, **options})


def _is_count(num_envs: Any) -> bool:
    return hasattr(num_envs, "__index__") and not isinstance(num_envs, bool) and num_envs >= 1


def _name(env: Any) -> str:
    return (
        f"the class {env.__module__}.{env.__qualname__}" if isinstance(env, type) else f"{type(env).__name__} {env!r}"
    )


def _atari(task: str, num_envs: int, settings: EnvSettings, seeding: dict[str, Any]) -> BaseEnv:
    from rlsample.env.atari import make_atari

    if settings.backend != "inline" or settings.vectorize == "loop":
        raise ConfigError(f"{_ATARI}{task} runs on C++ threads of its own: leave backend and vectorize as they are")
    return make_atari(task, num_envs, **{**seeding, **settings.env_config})


# ---------------------------------------------------------------------- worker processes


def _in_workers(env: Any, num_envs: int, settings: EnvSettings, seeding: dict[str, Any]) -> BaseEnv:
    from rlsample.env.async_vector_env import AsyncVectorEnv

    if settings.vectorize == "native":
        raise ConfigError("backend='process' runs one env per slot; vectorize='native' needs backend='inline'")
    if isinstance(env, (str, EnvSpec)):
        make = _make_from_spec(_find_spec(env), settings)
    elif isinstance(env, (gymnasium.Env, *_MANY)):
        raise ConfigError(
            f"{_name(env)} is built already, but backend='process' builds each env in a worker; give an id, class or "
            "factory"
        )
    elif isinstance(env, type):
        make = _make_from_class(env)
    elif _from_old_gym(env):
        raise _old_gym(env)
    elif callable(env):
        make = _make_from_factory(env)
    else:
        raise _unknown_kind(env)
    return AsyncVectorEnv(make, num_envs, settings=settings, pool=settings.pool, **seeding)


# ---------------------------------------------------------------------- several slots in one object


def _many(env: Any, num_envs: int, settings: EnvSettings, seeding: dict[str, Any]) -> BaseEnv:
    if isinstance(env, ServingEnv):
        _refuse_config(env, settings)
        return ServingEnvAdapter(env, sample_lanes=int(num_envs))
    if num_envs not in (1, env.num_envs):
        raise ConfigError(f"{type(env).__name__} has {env.num_envs} envs, so num_envs cannot be {num_envs}")
    if settings.vectorize == "loop":
        raise ConfigError(f"vectorize='loop' cannot take {type(env).__name__} apart; give an id, class or factory")
    _refuse_config(env, settings)
    if isinstance(env, BaseEnv):
        return env
    return adapter_of(env)(env, settings=settings, **seeding)


def _refuse_config(env: Any, settings: EnvSettings) -> None:
    if settings.env_config:
        raise ConfigError(f"env_config cannot reach {type(env).__name__}, which is built already; give a factory")


# ---------------------------------------------------------------------- ids and specs


def _find_spec(env: str | EnvSpec) -> EnvSpec:
    if isinstance(env, EnvSpec):
        return env
    module, _, env_id = env.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as e:
            raise ConfigError(f"env id {env!r}: {e}; the part before ':' must be a module that can be imported") from e
    if env_id.startswith("ALE/") and env_id not in gymnasium.registry:
        import ale_py

        gymnasium.register_envs(ale_py)
    if env_id in gymnasium.registry:
        return gymnasium.registry[env_id]
    error = unknown_name("env id", env_id, gymnasium.registry)
    if "did you mean" in str(error):
        raise error
    raise ConfigError(
        f"unknown env id {env_id!r}, and none of the {len(gymnasium.registry)} registered ids is near; import the "
        "package that registers it, or write 'module:id' (`rlsample envs` lists the known ids)"
    )


def _from_spec(spec: EnvSpec, num_envs: int, settings: EnvSettings, seeding: dict[str, Any]) -> BaseEnv:
    build = _make_from_spec(spec, settings)
    mode = settings.vectorize
    if mode == "native":
        if spec.vector_entry_point is None:
            raise ConfigError(f"{spec.id} has no vector form; use vectorize='auto' or 'loop'")
        try:
            vector = _make_native(spec, num_envs, settings)
        except Exception as e:
            raise ConfigError(f"the vector form of {spec.id} cannot be built ({type(e).__name__}: {e})") from e
        return _adapt(vector, settings, seeding)
    if mode == "loop" or spec.vector_entry_point is None or num_envs < _NATIVE_FROM:
        return GymEnvs(build, int(num_envs), settings=settings, **seeding)
    first, make = _call_once(build, num_envs, settings, seeding["worker_index"])
    same = _vector_form_of(first, spec, num_envs, settings)
    if same is None:
        return GymEnvs(make, int(num_envs), settings=settings, **seeding)
    first.close()
    return _adapt(same, settings, seeding)


def _make_from_spec(spec: EnvSpec, settings: EnvSettings) -> Make:
    return lambda ctx: gymnasium.make(spec, **{"disable_env_checker": True, **settings.env_config})


def _make_native(spec: EnvSpec, num_envs: int, settings: EnvSettings) -> GymnasiumVectorEnv[Any, Any, Any]:
    return gymnasium.make_vec(spec, int(num_envs), vectorization_mode="vector_entry_point", **dict(settings.env_config))


def _adapt(vector: GymnasiumVectorEnv[Any, Any, Any], settings: EnvSettings, seeding: dict[str, Any]) -> BaseEnv:
    try:
        return adapter_of(vector)(vector, settings=settings, **seeding)
    except BaseException:
        vector.close()
        raise


def _vector_form_of(
    env: gymnasium.Env[Any, Any], spec: EnvSpec, num_envs: int, settings: EnvSettings
) -> GymnasiumVectorEnv[Any, Any, Any] | None:
    """The spec's vector form if it can be built and has the spaces of ``env``, else None; says which in the log."""
    try:
        vector = _make_native(spec, num_envs, settings)
    except Exception as e:
        _log.warning(
            "%s: its vector form cannot be built (%s: %s); %d envs in a loop instead (vectorize='loop' silences this)",
            spec.id, type(e).__name__, e, num_envs,
        )  # fmt: skip
        return None
    same_obs = vector.single_observation_space == env.observation_space
    if not (same_obs and vector.single_action_space == env.action_space):
        vector.close()
        what = "action" if same_obs else "observation"
        _log.info("%s: its vector form has another %s space; %d envs in a loop instead", spec.id, what, num_envs)
        return None
    _log.info("%s: stepping %d envs in its own vector form (vectorize='loop' for one by one)", spec.id, num_envs)
    return vector


# ---------------------------------------------------------------------- objects, classes and factories


def _make_from_instance(env: gymnasium.Env[Any, Any], num_envs: int, settings: EnvSettings) -> Make:
    _refuse_config(env, settings)
    spec = env.spec
    more = "num_envs > 1" if num_envs > 1 else "max_restarts > 0" if settings.max_restarts else ""
    if more and spec is None:
        raise ConfigError(
            f"{more} needs more envs than this one {type(env).__name__}, which knows no spec; give its class or a "
            "factory: lambda ctx: MyEnv(...)"
        )

    def make(ctx: EnvContext) -> Any:
        if ctx.slot_index == 0 and ctx.incarnation == 0:
            return env
        assert spec is not None
        return gymnasium.make(spec, disable_env_checker=True)

    return make


def _make_from_class(cls: type) -> Make:
    if issubclass(cls, gymnasium.Env):
        return lambda ctx: cls(**ctx.config)
    if _from_old_gym(cls):
        raise _old_gym(cls)
    if issubclass(cls, _MANY):
        raise ConfigError(f"{_name(cls)} holds several envs; give an object of it, or a factory")
    raise ConfigError(f"{_name(cls)} is no gymnasium.Env; subclass it, or give a factory")


def _make_from_factory(factory: Callable[..., Any]) -> Make:
    takes_context = _takes_context(factory)

    def make(ctx: EnvContext) -> Any:
        made = in_gymnasium_terms(factory(ctx) if takes_context else factory())
        if isinstance(made, (gymnasium.Env, *_MANY)):
            return made
        if _from_old_gym(made):
            raise _old_gym(made)
        raise ConfigError(f"the factory returned {_name(made)}, expected a gymnasium.Env")

    return make


def _takes_context(factory: Callable[..., Any]) -> bool:
    """Whether a required parameter, or one named ctx, is there to take it; ``partial(gymnasium.make, id)`` has none."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # a builtin tells nothing
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 1 or keywords:
        names = ", ".join([*(p.name for p in required), *keywords])
        raise ConfigError(f"an env factory takes an EnvContext or nothing, but {factory!r} needs ({names})")
    return bool(required) or (bool(positional) and positional[0].name == "ctx")


def _call_once(make: Make, num_envs: int, settings: EnvSettings, worker_index: int) -> tuple[Any, Make]:
    """Makes slot 0's env now; the second result hands that very env out for slot 0, and makes all others."""
    try:
        made = make(EnvContext(worker_index, 0, int(num_envs), 0, settings.env_config))
    except EnvFailedError:
        raise
    except Exception as e:
        raise EnvFailedError(f"slot 0: __init__ raised {type(e).__name__}: {e}", slot=0) from e

    def again(ctx: EnvContext) -> Any:
        return made if ctx.slot_index == 0 and ctx.incarnation == 0 else make(ctx)

    return made, again


def _from_old_gym(env: Any) -> bool:
    """Whether the class comes from the package gym; gym itself is never imported."""
    cls = env if isinstance(env, type) else type(env)
    return any(base.__module__.partition(".")[0] == "gym" for base in cls.__mro__)


def _old_gym(env: Any) -> ConfigError:
    return ConfigError(
        f"{_name(env)} is an env of the old package gym, whose step returns 4 values; convert it with Shimmy "
        "(pip install shimmy; shimmy.GymV21CompatibilityV0(env=env) or GymV26CompatibilityV0)"
    )
