"""Images less what never moves: exact statistics, and numbers that travel with the weights and are never trained."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rlsample.errors import ConfigError
from rlsample.policy import A2CPolicy, DQNPolicy, DQNSettings, ModelSettings
from rlsample.policy.image_norm import ImageNorm, PixelStatistics

IMAGE = Box(0, 255, (2, 36, 40), np.uint8)
MODEL = ModelSettings(image_features=8, conv_filters=(4, 8, 4), image_norm_steps=1)


def pixels(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, *IMAGE.shape), np.uint8)


def test_pixel_statistics_are_exact_however_the_rows_are_cut():
    rows = np.array([[0, 10, 255], [4, 10, 0], [8, 10, 255]], np.uint8)
    for cut in (0, 1, 2):
        statistics = PixelStatistics()
        for part in (rows[:cut], rows[cut:]):
            statistics.add(part)
        mean, deviation = statistics.result()
        np.testing.assert_array_equal(mean, [4, 10, 170])
        np.testing.assert_allclose(deviation, [(32 / 3) ** 0.5, 0, 255 * 2**0.5 / 3], rtol=1e-12)


def test_there_are_no_statistics_of_no_rows():
    statistics = PixelStatistics()
    statistics.add(np.zeros((0, 3), np.uint8))
    with pytest.raises(ConfigError, match="at least one image"):
        statistics.result()


def test_pixels_are_scaled_to_one_until_their_statistics_are_set():
    norm = ImageNorm((3,))
    image = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    torch.testing.assert_close(norm(image), torch.tensor([[0.0, 0.2, 1.0]]))
    # 20 levels wide, hardly changing (0.5 counts as 5), and beyond the limit
    norm.set(np.array([10.0, 50.0, 40.0]), np.array([20.0, 0.5, 1.0]))
    torch.testing.assert_close(norm(image), torch.tensor([[-0.5, 0.2, 5.0]]))
    assert not any(parameter.requires_grad for parameter in norm.parameters())


def test_each_pixel_of_each_image_has_its_own_statistics(make):
    space = Dict({"eye": Box(0, 255, (36, 40, 1), np.uint8), "map": Box(0, 255, (38, 36), np.uint8)})
    policy = make(A2CPolicy, obs_space=space, model=ModelSettings(image_norm_steps=1, image_features=8))
    rng = np.random.default_rng(1)
    obs = {name: rng.integers(0, 256, (6, *space[name].shape), np.uint8) for name in space}
    policy.fit_images([{name: part[:2] for name, part in obs.items()}, {name: part[2:] for name, part in obs.items()}])
    weights = policy.get_weights()
    for i, name in enumerate(("eye", "map")):
        np.testing.assert_allclose(weights[f"policy_trunk.norms.{i}.mean"], obs[name].mean(0), rtol=1e-6)
        spread = np.maximum(obs[name].std(0), 5)
        np.testing.assert_allclose(weights[f"policy_trunk.norms.{i}.spread"], spread, rtol=1e-6)


def test_separate_trunks_and_the_target_net_see_the_same_pixels():
    model = ModelSettings(image_features=8, conv_filters=(4, 8, 4), image_norm_steps=1, shared=False)
    policy = DQNPolicy(IMAGE, Discrete(2), DQNSettings(model=model))
    images = pixels(3)
    policy.fit_images([images])
    target = policy.get_state()["target"]
    for trunk in ("policy_trunk", "value_trunk"):
        np.testing.assert_allclose(target[f"{trunk}.norms.0.mean"], images.mean(0), rtol=1e-6)


def test_the_statistics_travel_with_the_weights_and_no_update_changes_them(make, learning_batch):
    """Adam moves a parameter whose gradient is 0 by nothing, but only from the first update on."""
    policy = make(A2CPolicy, obs_space=IMAGE, model=MODEL)
    version = policy.version
    policy.fit_images([pixels(5)])
    assert policy.version == version
    other = make(A2CPolicy, obs_space=IMAGE, model=MODEL, seed=1)
    other.set_weights(policy.get_weights())
    images = pixels(4, seed=2)
    np.testing.assert_array_equal(other.values(images), policy.values(images))
    before = policy.get_weights()
    for seed in range(3):
        policy.learn(learning_batch(policy, rows=6, seed=seed))
    after = policy.get_weights()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {name for name in before if ".norms." not in name}


def test_without_images_or_rows_nothing_is_changed(make):
    policy = make(A2CPolicy, obs_space=IMAGE, model=MODEL)
    before = policy.get_weights()["policy_trunk.norms.0.spread"]
    with pytest.raises(ConfigError, match="at least one image"):
        policy.fit_images([])
    np.testing.assert_array_equal(policy.get_weights()["policy_trunk.norms.0.spread"], before)
    for wrong in (make(A2CPolicy), make(A2CPolicy, obs_space=IMAGE, model=ModelSettings(image_features=8))):
        with pytest.raises(ConfigError, match="needs images"):
            wrong.fit_images([pixels(1)])
