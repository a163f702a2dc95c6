import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from rlsample.errors import ConfigError
from rlsample.policy import ModelSettings
from rlsample.policy.distributions import make_distribution
from rlsample.policy.flat_parameters import FlatParameters
from rlsample.policy.model_passes import ChainPass, TorchPass
from rlsample.policy.models import ActorCritic
from rlsample.policy.numpy_inference import NumpyInference
from rlsample.policy.obs_encoding import Encoded, ObsEncoder

THREE = Discrete(3)
GAUSS = Box(-1, 1, (2,), np.float32)


def build(obs_space, action_space=THREE, seed=0, **settings):
    encoder, dist = ObsEncoder(obs_space), make_distribution(action_space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return encoder, ActorCritic(encoder, dist, ModelSettings(**settings))


def vector(width=5):
    return Box(-9, 9, (width,), np.float32)


def tensors(encoder, obs):
    flat, images = encoder.encode(obs)
    return Encoded(torch.from_numpy(flat), tuple(torch.from_numpy(image) for image in images))


def test_initial_weights_are_orthogonal_with_the_gains_of_the_heads():
    _, model = build(vector(64), Discrete(3), hidden=(64, 64))
    square = model.policy_trunk.net[0].weight
    torch.testing.assert_close(square @ square.T, 2 * torch.eye(64), atol=1e-4, rtol=0)
    head = model.policy_head.weight
    torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(3), atol=1e-7, rtol=0)
    assert model.value_head.weight.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))


def test_separate_nets_share_nothing_and_a_shared_trunk_serves_both():
    encoder, model = build(vector())
    assert not model.shared
    x = tensors(encoder, np.ones((2, 5), np.float32))
    model(x)[0].sum().backward()
    assert model.value_trunk.net[0].weight.grad is None
    encoder, model = build(vector(), shared=True, activation="relu", hidden=(7,))
    assert model.value_trunk is None
    inputs, values = model(x)
    assert inputs.shape == (2, 3)
    assert values.shape == (2,)
    torch.testing.assert_close(model.value(x), values)


def test_images_go_through_convolutions_with_pixels_scaled_to_one():
    space = Dict({"eye": Box(0, 255, (40, 44, 3), np.uint8), "n": Discrete(2), "map": Box(0, 255, (36, 36), np.uint8)})
    encoder, model = build(space, GAUSS, image_features=16)
    assert model.shared
    assert model.policy_head.in_features == 2 * 16 + 2
    rng = np.random.default_rng(0)
    obs = {
        "eye": rng.integers(0, 256, (2, 40, 44, 3), np.uint8),
        "n": np.array([0, 1]),
        "map": rng.integers(0, 256, (2, 36, 36), np.uint8),
    }
    inputs, values = model(tensors(encoder, obs))
    assert inputs.shape == (2, 4)
    assert values.shape == (2,)
    seen = []
    model.policy_trunk.nets[0][0].register_forward_hook(lambda _, args, __: seen.append(args[0]))
    model(tensors(encoder, obs))
    torch.testing.assert_close(seen[0], torch.from_numpy(obs["eye"]).permute(0, 3, 1, 2) / 255)


def test_convolutions_are_those_of_the_option():
    _, model = build(Box(0, 255, (4, 42, 36), np.uint8), image_features=8, conv_filters=[5, 4, 2, 6, 3, 3])
    first, _, second, _, _, last, _ = model.policy_trunk.nets[0]
    assert first.weight.shape == (5, 4, 4, 4)
    assert (first.stride, second.stride) == ((2, 2), (3, 3))
    assert second.weight.shape == (6, 5, 3, 3)
    assert last.weight.shape == (8, 6 * 6 * 5)  # 42x36 -> 20x17 -> 6x5


def test_convolutions_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="kernel of 6x6 does not fit the 5x5 that are left of an image of shape"):
        build(Box(0, 255, (36, 36), np.uint8), conv_filters=(4, 8, 6, 4, 6, 1))


def test_channels_first_and_last_are_the_same_net():
    first, model = build(Box(0, 255, (3, 40, 44), np.uint8), image_features=8)
    last, other = build(Box(0, 255, (40, 44, 3), np.uint8), image_features=8)
    image = np.random.default_rng(0).integers(0, 256, (2, 3, 40, 44), np.uint8)
    a = model(tensors(first, image))[0]
    b = other(tensors(last, np.ascontiguousarray(image.transpose(0, 2, 3, 1))))[0]
    torch.testing.assert_close(a, b)


def test_log_std_fills_the_free_inputs():
    encoder, model = build(vector(), Tuple((GAUSS, Discrete(2), Box(-1, 1, (), np.float32))), log_std_init=-0.5)
    inputs, _ = model(tensors(encoder, np.zeros((3, 5), np.float32)))
    assert inputs.shape == (3, 8)
    torch.testing.assert_close(inputs[:, 5:], torch.full((3, 3), -0.5))


@pytest.mark.parametrize(("hidden", "rows", "most"), [((64, 64), 1000, 1 << 18), ((512, 512), 8, 8 * 513 * 513)])
def test_numpy_multiplies_in_pieces_that_blas_computes_in_one_thread(hidden, rows, most):
    """Wide layers are left whole: their pieces would have few rows."""
    _, model = build(vector(), Discrete(3), hidden=hidden)
    plan = NumpyInference(model.chains(), model.log_std).plan(rows)
    products = [(f.__self__, b) for f, b, _ in plan.steps if hasattr(f, "__self__")]
    sizes = [len(a) * b.size for a, b in products if isinstance(a, np.ndarray)]
    assert max(sizes) <= most
    assert sum(sizes) == rows * sum(b.size for b in {id(b): b for _, b in products}.values())


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (8,), (6, 9), (64, 64)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("actions", [Discrete(3), GAUSS])
def test_the_numpy_forward_pass_equals_torch_at_every_width(activation, hidden, shared, actions):
    encoder, model = build(vector(), actions, hidden=hidden, activation=activation, shared=shared)
    engine = NumpyInference(model.chains(), model.log_std)
    rng = np.random.default_rng(0)
    for change in range(2):
        for rows in (3, 1, 64, 200, 3):
            obs = rng.normal(size=(rows, 5)).astype(np.float32)
            plan = engine.plan(rows)
            encoder.write_flat(obs, plan.flat)
            inputs, values = engine.run(plan)
            with torch.no_grad():
                expected = model(tensors(encoder, obs))
            np.testing.assert_allclose(inputs, expected[0].numpy(), atol=1e-5)
            np.testing.assert_allclose(values, expected[1].numpy(), atol=1e-5)
            np.testing.assert_allclose(engine.values(obs), expected[1].numpy(), atol=1e-5)
        if change == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += torch.from_numpy(rng.normal(size=parameter.shape).astype(np.float32)) * 0.3
            engine.refresh()


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (8,), (6, 9)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("actions", [Discrete(3), GAUSS])
def test_the_pass_without_a_graph_equals_autograd(activation, hidden, shared, actions):
    encoder, model = build(vector(), actions, hidden=hidden, activation=activation, shared=shared, log_std_init=0.3)
    parameters = FlatParameters(model)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        parameters.values += torch.from_numpy(rng.normal(size=len(parameters.values)).astype(np.float32)) * 0.2
    by_hand, by_torch = ChainPass(model.chains(), model.log_std), TorchPass(model, torch.device("cpu"))
    for rows in (7, 1, 30):
        encoded = encoder.encode(rng.normal(size=(rows, 5)).astype(np.float32))
        kept = encoded.flat.copy()
        results = []
        for way in (by_hand, by_torch):
            inputs, values = way.forward(encoded)
            assert inputs.dtype == values.dtype == np.float32
            d_inputs = np.random.default_rng(rows).normal(size=inputs.shape).astype(np.float32)
            d_values = np.random.default_rng(rows + 1).normal(size=rows).astype(np.float32)
            parameters.grad.zero_()
            way.backward(d_inputs, d_values)
            results.append((inputs.copy(), values.copy(), parameters.grad.numpy().copy()))
        for got, expected in zip(*results, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert rows < 30 or (results[0][2] != 0).mean() > 0.6
        np.testing.assert_array_equal(encoded.flat, kept)


def test_conv_models_have_no_chains():
    assert build(Box(0, 255, (3, 40, 44), np.uint8), image_features=8)[1].chains() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "tahn"}, "did you mean 'tanh'"),
        ({"hidden": (64, 0)}, "layer width 0"),
        ({"hidden": (64.0,)}, "layer width 64.0"),
        ({"image_features": -1}, "layer width -1"),
        ({"conv_filters": (32, 8)}, "filters, kernel and stride"),
        ({"conv_filters": (32, 8, 0)}, "filters, kernel and stride"),
        ({"image_norm_steps": -1}, "image_norm_steps must be 0 or more"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        ModelSettings(**options)
