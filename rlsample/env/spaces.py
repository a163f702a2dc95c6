r"""Spaces as columns: what is allowed, what the columns look like, and how values cross over.

The one import for it: the parts live in ``columns``, ``action_codec`` and ``obs_writer``.

=================  ==========================  =====================  ==========================================
space              column of K rows            dtype                  action handed to one env
=================  ==========================  =====================  ==========================================
Box(shape)         [K, \*shape]                the space's own        ndarray of the shape (0-d for ``()``)
Discrete           [K]                         the space's (int64)    Python int
MultiDiscrete      [K, \*nvec.shape]           the space's            ndarray
MultiBinary(n)     [K, \*n]                    int8                   ndarray
Dict, Tuple        dict, tuple of columns                             dict, tuple
any other space    [K]                         object                 the value
=================  ==========================  =====================  ==========================================

Text, Graph, Sequence, OneOf and spaces of the user's own have no fixed size. They are refused unless ``any_size=True``,
as inline and pooled Gymnasium envs have it; samplers and policies refuse them.
"""

from rlsample.env.action_codec import ActionCodec
from rlsample.env.columns import (
    LeafSpec,
    check_action_space,
    check_observation_space,
    clip_to_space,
    empty_columns,
    leaf_spec,
    object_column,
    unsquash,
    zeros_columns,
)
from rlsample.env.obs_writer import ObsWriter, check_finite, coerce_reward, nonfinite_rows

__all__ = [
    "ActionCodec",
    "LeafSpec",
    "ObsWriter",
    "check_action_space",
    "check_finite",
    "check_observation_space",
    "clip_to_space",
    "coerce_reward",
    "empty_columns",
    "leaf_spec",
    "nonfinite_rows",
    "object_column",
    "unsquash",
    "zeros_columns",
]
