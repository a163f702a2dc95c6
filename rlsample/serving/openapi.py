"""The OpenAPI description of the server, made from its spaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample.serving.http_errors import STATUS
from rlsample.serving.page_files import PAGE_PATHS
from rlsample.serving.wire import ARRAY_KEY

__all__ = ["describe_api"]

Schema = dict[str, Any]

_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_STRING: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_T: Schema = {"type": ["integer", "null"], "description": "actions so far in this episode; another count is a conflict"}
_REWARD: Schema = {"type": ["number", "null"], "description": "of the action before, as by returns"}
_ID: Schema = {"type": "string", "pattern": "^[A-Za-z0-9._~-]{1,128}$"}


def describe_api(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], version: str, with_token: bool
) -> Schema:
    """An OpenAPI 3.1 document that lists every route."""
    obs, action = _space_schema(observation_space), _space_schema(action_space)
    paths = {**_episode_paths(obs, action), **_other_paths(obs, action)}
    for path in PAGE_PATHS:
        paths[path] = {"get": _operation("A file of the live page and the demo", None, {"200": "the file"}, ())}
    components: Schema = {
        "schemas": {
            "Error": _object({"error": _object({"code": _STRING, "message": _STRING}, ["code", "message"])}, ["error"])
        },
        "responses": {code: _refusal(code) for code in STATUS},
    }
    document: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "rlsample policy server",
            "version": version,
            "description": "The environment asks, the policy answers. Bodies are JSON or msgpack; see docs/serving.md.",
        },
        "paths": paths,
        "components": components,
    }
    if with_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _episode_paths(obs: Schema, action: Schema) -> Schema:
    episode = [{"name": "id", "in": "path", "required": True, "schema": _ID}]
    answer = _object({"action": action, "policy_version": _INTEGER, "t": _INTEGER})
    with_t = {"t": _T}
    calls = {
        "action": (
            "The policy's action for an observation",
            _object({"obs": obs, "reward": _REWARD, **with_t}, ["obs"]),
            answer,
        ),
        "log_action": (
            "Records an action that was chosen elsewhere",
            _object(
                {"obs": obs, "action": action, "action_logp": _or_null(_NUMBER), "reward": _REWARD, **with_t},
                ["obs", "action"],
            ),
            _object({}),
        ),
        "returns": (
            "Adds to the reward of the last action",
            _object({"reward": _NUMBER, "info": {"type": ["object", "null"]}, **with_t}, ["reward"]),
            _object({}),
        ),
        "end": (
            "Ends the episode",
            _object({"obs": obs, "truncated": _BOOLEAN, "reward": _REWARD, **with_t}, ["obs"]),
            _object({}),
        ),
    }
    refusals = ("bad_value", "unknown_episode", "conflict", "busy")
    paths: Schema = {
        "/v1/episodes": {
            "post": _call(
                "Opens an episode",
                _object({"episode_id": _or_null(_ID), "training_enabled": _BOOLEAN}),
                _object({"episode_id": _ID}, ["episode_id"]),
                ("bad_value", "conflict", "busy"),
                status="201",
            )
        }
    }
    for verb, (summary, body, found) in calls.items():
        more = ("policy_failed",) if verb == "action" else ()
        operation = _call(summary, body, found, refusals + more)
        operation["parameters"] = episode + operation["parameters"]
        paths[f"/v1/episodes/{{id}}/{verb}"] = {"post": operation}
    return paths


def _other_paths(obs: Schema, action: Schema) -> Schema:
    many_obs, many_actions = _stacked(obs), _stacked(action)
    ids = {"type": "array", "items": _ID, "minItems": 1, "uniqueItems": True}
    rewards = {"type": ["array", "null"], "items": _NUMBER}
    batch = _object({"episode_ids": ids, "obs": many_obs, "rewards": rewards}, ["episode_ids", "obs"])
    found = _object({"actions": many_actions, "policy_version": _INTEGER})
    columns = {"obs": many_obs, "actions": many_actions, "rewards": {"type": "array", "items": _NUMBER}}
    logp = {"action_logp": {"type": ["array", "null"], "items": _NUMBER}}
    fragment = {
        "episode_id": _ID,
        "rows": _object({**columns, **logp}, list(columns)),
        "policy_version": _INTEGER,
        "t": _T,
        "final_obs": _or_null(obs),
        "truncated": _BOOLEAN,
    }
    have = {"name": "have", "in": "query", "schema": {"type": "integer", "minimum": 0}}
    weights = _operation(
        "The policy's weights, as msgpack",
        None,
        {"200": "version, model and weights", "304": "have is the newest"},
        ("bad_value",),
    )
    weights["parameters"] = [have]
    space = {"type": "object"}
    return {
        "/v1/actions": {
            "post": _call(
                "Actions of several episodes at once, or of none",
                batch,
                found,
                ("bad_value", "unknown_episode", "conflict", "busy", "policy_failed"),
            )
        },
        "/v1/act": {
            "post": _call(
                "Actions without an episode: nothing is recorded",
                _object({"obs": many_obs}, ["obs"]),
                found,
                ("bad_value", "policy_failed"),
            )
        },
        "/v1/fragments": {
            "post": _call(
                "Rows that were acted elsewhere, all or none",
                _object(fragment, ["episode_id", "rows"]),
                _object({"t": _INTEGER, "policy_version": _INTEGER}),
                ("bad_value", "unknown_episode", "conflict", "busy"),
            )
        },
        "/v1/spaces": {"get": _query("The spaces", _object({"observation_space": space, "action_space": space}))},
        "/v1/weights": {"get": weights},
        "/v1/stats": {"get": _query("What happens now", {"type": "object"})},
        "/healthz": {"get": _operation("Whether sampling works", None, {"200": "it does"}, ("closed",))},
        "/metrics": {"get": _operation("Metrics for Prometheus", None, {"200": "text"}, ())},
        "/openapi.json": {"get": _query("This document", {"type": "object"})},
        "/docs": {"get": _operation("This document as a page", None, {"200": "HTML"}, ())},
    }


# ---------------------------------------------------------------------- operations


def _call(summary: str, body: Schema, found: Schema, refusals: tuple[str, ...], status: str = "200") -> Schema:
    keyed = ("too_large", "media_type", "key_reused")
    operation = _operation(summary, body, {status: "done"}, (*refusals, *keyed))
    operation["responses"][status]["content"] = {"application/json": {"schema": found}, "application/msgpack": {}}
    key = {"type": "string", "pattern": "^[!-~]{1,128}$"}
    about = "a call that is repeated with its key is answered as before and not done again"
    operation["parameters"] = [{"name": "Idempotency-Key", "in": "header", "schema": key, "description": about}]
    return operation


def _query(summary: str, found: Schema) -> Schema:
    operation = _operation(summary, None, {"200": "found"}, ())
    operation["responses"]["200"]["content"] = {"application/json": {"schema": found}}
    return operation


def _operation(summary: str, body: Schema | None, answers: dict[str, str], refusals: tuple[str, ...]) -> Schema:
    codes = [*refusals, "unauthorized", "wrong_host", "method", "rate_limited", "closed"]
    responses: Schema = {status: {"description": text} for status, text in answers.items()}
    for code in codes:
        responses.setdefault(str(STATUS[code]), {"$ref": f"#/components/responses/{code}"})
    operation: Schema = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}, "application/msgpack": {"schema": body}},
        }
    return operation


def _refusal(code: str) -> Schema:
    response: Schema = {
        "description": code,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}, "application/msgpack": {}},
    }
    if STATUS[code] in (429, 503):
        response["headers"] = {"Retry-After": {"schema": _INTEGER}}
    return response


# ---------------------------------------------------------------------- schemas


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    return schema


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _stacked(schema: Schema) -> Schema:
    """K values of a space: its structure, with K more at the front of each array."""
    if "prefixItems" in schema:
        return {**schema, "prefixItems": [_stacked(s) for s in schema["prefixItems"]]}
    if "properties" in schema:
        return {**schema, "properties": {k: _stacked(s) for k, s in schema["properties"].items()}}
    leaf = schema["anyOf"][0] if "anyOf" in schema else schema
    return _leaf({"type": "array", "items": leaf})


def _space_schema(space: gymnasium.Space[Any]) -> Schema:
    if isinstance(space, spaces.Dict):
        parts = {k: _space_schema(s) for k, s in space.spaces.items()}
        return _object(parts, list(parts))
    if isinstance(space, spaces.Tuple):
        items = [_space_schema(s) for s in space.spaces]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items), "items": False}
    if isinstance(space, spaces.Discrete):
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
    schema: Schema = dict(_NUMBER if np.dtype(space.dtype).kind == "f" else _INTEGER)
    if isinstance(space, spaces.MultiBinary):
        schema.update(minimum=0, maximum=1)
    elif np.dtype(space.dtype).kind in "iu":
        limits = np.iinfo(np.dtype(space.dtype))
        schema.update(minimum=int(limits.min), maximum=int(limits.max))
    for size in reversed(space.shape or ()):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return _leaf(schema) if space.shape else schema


def _leaf(lists: Schema) -> Schema:
    array = _object(
        {ARRAY_KEY: _STRING, "dtype": _STRING, "shape": {"type": "array", "items": _INTEGER}},
        [ARRAY_KEY, "dtype", "shape"],
    )
    return {"anyOf": [lists, array]}
