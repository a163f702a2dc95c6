import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Text, Tuple

from rlsample.errors import SpaceError
from rlsample.policy.obs_encoding import ImageSpec, ObsEncoder


def test_each_kind_of_space_has_its_part_of_the_vector_in_order():
    space = Dict(
        {
            "a": Box(-9, 9, (2, 2), np.float64),
            "b": Discrete(3, start=4),
            "c": Tuple((MultiDiscrete([2, 3], start=[0, 1]), Box(-9, 9, (), np.int16))),
            "d": MultiBinary(2),
        }
    )
    obs = {
        "a": np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], np.float64),
        "b": np.array([6, 4]),
        "c": (np.array([[1, 3], [0, 1]]), np.array([-7, 8], np.int16)),
        "d": np.array([[0, 1], [1, 1]], np.int8),
    }
    encoder = ObsEncoder(space)
    assert encoder.flat_width == 15
    flat, images = encoder.encode(obs)
    assert flat.dtype == np.float32
    assert images == ()
    np.testing.assert_array_equal(
        flat,
        [
            [1, 2, 3, 4, 0, 0, 1, 0, 1, 0, 0, 1, -7, 0, 1],
            [5, 6, 7, 8, 1, 0, 0, 1, 0, 1, 0, 0, 8, 1, 1],
        ],
    )
    wide = np.full((2, 16), 99, np.float32)
    encoder.write_flat(obs, wide[:, :15])
    np.testing.assert_array_equal(wide[:, :15], flat)
    np.testing.assert_array_equal(wide[:, 15], [99, 99])


def test_a_float32_vector_is_passed_on_and_others_are_cast():
    encoder = ObsEncoder(Box(-9, 9, (3,), np.float32))
    obs = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert encoder.encode(obs).flat is obs
    as_double = encoder.encode(obs.astype(np.float64)).flat
    assert as_double.dtype == np.float32
    np.testing.assert_array_equal(as_double, obs)
    scalar = ObsEncoder(Box(-9, 9, (), np.float32)).encode(np.array([4, 5], np.float32))
    np.testing.assert_array_equal(scalar.flat, [[4], [5]])


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((84, 84), ImageSpec((84, 84), None)),
        ((4, 84, 84), ImageSpec((4, 84, 84), 0)),
        ((210, 160, 3), ImageSpec((210, 160, 3), -1)),
        ((36, 36, 36), ImageSpec((36, 36, 36), 0)),
        ((3, 35, 84), None),
        ((35, 35), None),
        ((84,), None),
    ],
)
def test_which_boxes_are_images(shape, spec):
    encoder = ObsEncoder(Box(0, 255, shape, np.uint8))
    assert encoder.images == (() if spec is None else (spec,))
    assert encoder.flat_width == (int(np.prod(shape)) if spec is None else 0)
    assert ObsEncoder(Box(0, 255, shape, np.float32)).images == ()


def test_images_in_a_dict_stay_bytes_and_are_not_copied():
    space = Dict({"n": Discrete(2), "eye": Box(0, 255, (1, 40, 40), np.uint8)})
    obs = {"n": np.array([1, 0, 1]), "eye": np.zeros((3, 1, 40, 40), np.uint8)}
    flat, images = ObsEncoder(space).encode(obs)
    np.testing.assert_array_equal(flat, [[0, 1], [1, 0], [0, 1]])
    assert images[0] is obs["eye"]


def test_the_mask_is_no_input_but_only_at_the_top():
    space = Dict({"obs": Box(0, 1, (2,), np.float32), "action_mask": Tuple((MultiBinary(2), MultiBinary(3)))})
    encoder = ObsEncoder(space)
    assert encoder.flat_width == 2
    obs = {
        "obs": np.zeros((1, 2), np.float32),
        "action_mask": (np.array([[1, 0]], np.int8), np.array([[0, 1, 1]], np.int8)),
    }
    np.testing.assert_array_equal(encoder.mask(obs), [[1, 0, 0, 1, 1]])
    nested = ObsEncoder(Dict({"inner": Dict({"action_mask": MultiBinary(2)})}))
    assert nested.flat_width == 2
    assert not nested.has_mask


@pytest.mark.parametrize(
    ("space", "obs", "message"),
    [
        (Box(0, 1, (3,), np.float32), np.zeros((2, 1), np.float32), r"shape \(2, 1\), expected \(2, 3\)"),
        (Box(0, 1, (3,), np.float32), np.zeros((2, 4), np.float32), r"shape \(2, 4\), expected \(2, 3\)"),
        (Dict({"x": Discrete(2)}), {"x": np.zeros((2, 1), np.int64)}, r"\['x'\] have shape \(2, 1\)"),
    ],
)
def test_observations_of_another_shape_are_refused(space, obs, message):
    with pytest.raises(SpaceError, match=message):
        ObsEncoder(space).encode(obs)


@pytest.mark.parametrize("space", [Text(3), Dict({"g": Graph(Discrete(2), None)}), Dict({"action_mask": Discrete(2)})])
def test_spaces_that_no_model_reads_are_refused(space):
    with pytest.raises(SpaceError, match="read"):
        ObsEncoder(space)
