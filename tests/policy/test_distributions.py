import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from torch import distributions as td

from rlsample.errors import SpaceError
from rlsample.policy.distributions import MASKED_LOGIT, make_distribution
from rlsample.policy.noise import NoiseStream
from rlsample.tree import leaves, map_tree

SPACES = {
    "discrete": Discrete(5),
    "discrete two": Discrete(2),
    "discrete many": Discrete(40),
    "discrete start": Discrete(3, start=5),
    "discrete int32": Discrete(4, dtype=np.int32),
    "multi even": MultiDiscrete([3, 3]),
    "multi uneven": MultiDiscrete([2, 4, 3]),
    "multi 2-D start": MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 0], [-2, 7]])),
    "box": Box(-1, 1, (3,), np.float32),
    "box scalar": Box(-1, 1, (), np.float32),
    "box 2-D float64": Box(-2, 2, (2, 2), np.float64),
    "box int8": Box(-9, 9, (2,), np.int8),
    "binary": MultiBinary(3),
    "binary 2-D": MultiBinary([2, 2]),
    "nested": Dict(
        {
            "move": Discrete(3, start=-1),
            "aim": Box(-1, 1, (2,), np.float32),
            "more": Tuple((MultiBinary(2), MultiDiscrete([2, 3]), Box(0, 1, (), np.float32))),
        }
    ),
}
K = 50


def torch_leaf(space, inputs):
    """The torch.distributions object of a plain space, and its actions' form."""
    x = torch.from_numpy(inputs).double()
    if isinstance(space, Discrete):
        return [(td.Categorical(logits=x), lambda a: a - int(space.start))]
    if isinstance(space, MultiDiscrete):
        parts = torch.split(x, space.nvec.reshape(-1).tolist(), dim=1)
        start = torch.as_tensor(np.asarray(space.start)).reshape(-1)
        return [
            (td.Categorical(logits=part), lambda a, i=i: a.reshape(len(a), -1)[:, i] - start[i])
            for i, part in enumerate(parts)
        ]
    if isinstance(space, MultiBinary):
        return [(td.Independent(td.Bernoulli(logits=x), 1), lambda a: a.reshape(len(a), -1).double())]
    d = x.shape[1] // 2
    return [(td.Independent(td.Normal(x[:, :d], x[:, d:].exp()), 1), lambda a: a.reshape(len(a), d).double())]


def reference(space, inputs, actions):
    """logp and entropy by torch.distributions, for plain and nested spaces."""
    if isinstance(space, (Dict, Tuple)):
        members = list(space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces))
        dists = [make_distribution(member) for _, member in members]
        output, free = 0, sum(d.num_outputs for d in dists)
        logp = entropy = 0
        for (key, member), dist in zip(members, dists, strict=True):
            cols = [*range(output, output + dist.num_outputs), *range(free, free + dist.num_free)]
            output, free = output + dist.num_outputs, free + dist.num_free
            a, b = reference(member, inputs[:, cols], actions[key])
            logp, entropy = logp + a, entropy + b
        return logp, entropy
    parts = torch_leaf(space, inputs)
    logp = sum(dist.log_prob(form(torch.from_numpy(actions))) for dist, form in parts)
    return logp.numpy(), sum(dist.entropy() for dist, _ in parts).numpy()


def random_inputs(dist, scale=1.5, seed=1, rows=K):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(scale=scale, size=(rows, dist.num_inputs)).astype(np.float32)
    inputs[:, dist.num_outputs :] = rng.uniform(-1, 0.5, dist.num_free)
    return inputs


@pytest.mark.parametrize("name", SPACES)
def test_shapes_dtypes_and_values_are_those_of_the_space(name):
    space = SPACES[name]
    dist = make_distribution(space)
    inputs = random_inputs(dist)
    noise = NoiseStream(dist.noise_kinds, 0)
    batched = gymnasium.vector.utils.batch_space(space, K)
    sampled, mode = dist.sample(inputs, noise.take(K)), dist.mode(inputs)
    acted, logp = dist.act(inputs, noise.take(K))
    assert logp.shape == (K,)
    assert logp.dtype == np.float32
    for actions in (sampled, mode, acted):
        if name.startswith("box") or name == "nested":  # means are not held inside the bounds
            like = batched.sample()
            assert [(x.dtype, x.shape) for x in leaves(actions)] == [(x.dtype, x.shape) for x in leaves(like)]
            assert [type(x) for x in (actions,)] == [dict if name == "nested" else np.ndarray]
        else:
            assert actions in batched
    if name == "nested":
        assert list(sampled) == list(space.spaces)
        assert set(np.unique(sampled["move"])) == {-1, 0, 1}


@pytest.mark.parametrize("name", SPACES)
def test_logp_and_entropy_equal_torch_distributions(name):
    space = SPACES[name]
    dist = make_distribution(space)
    inputs = random_inputs(dist)
    noise = NoiseStream(dist.noise_kinds, 0)
    actions = dist.sample(inputs, noise.take(K))
    logp, entropy = reference(space, inputs, actions)
    tensors = map_tree(torch.from_numpy, actions)
    np.testing.assert_allclose(dist.logp(inputs, actions), logp, atol=1e-5)
    np.testing.assert_allclose(dist.logp_torch(torch.from_numpy(inputs), tensors).numpy(), logp, atol=1e-5)
    np.testing.assert_allclose(dist.entropy_torch(torch.from_numpy(inputs)).numpy(), entropy, atol=1e-5)


@pytest.mark.parametrize("d_entropy", [0.0, -0.7])
@pytest.mark.parametrize("name", SPACES)
def test_scores_and_their_gradients_equal_torch(name, d_entropy):
    space = SPACES[name]
    dist = make_distribution(space)
    inputs = random_inputs(dist)
    actions = dist.sample(inputs, NoiseStream(dist.noise_kinds, 0).take(K))
    before = inputs.copy()
    score = dist.score(inputs, actions)
    logp, entropy = reference(space, inputs, actions)
    np.testing.assert_allclose(score.logp, logp, atol=1e-5)
    np.testing.assert_allclose(score.entropy, entropy, atol=1e-5)
    weights = np.random.default_rng(3).normal(size=K).astype(np.float32)
    x = torch.from_numpy(inputs).requires_grad_()
    of_logp = dist.logp_torch(x, map_tree(torch.from_numpy, actions)) * torch.from_numpy(weights)
    (of_logp.sum() + d_entropy * dist.entropy_torch(x).sum()).backward()
    gradient = score.gradient(weights, d_entropy)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-4, atol=1e-5)
    for array in (score.logp, score.entropy, gradient):
        assert array.dtype == np.float32
    np.testing.assert_array_equal(inputs, before)


@pytest.mark.parametrize("rows", [1, 2, K])
@pytest.mark.parametrize("name", SPACES)
def test_act_is_sample_and_logp_in_one_and_without_noise_the_mode(name, rows):
    dist = make_distribution(SPACES[name])
    inputs = random_inputs(dist, rows=rows)
    noise = NoiseStream(dist.noise_kinds, 3).take(rows)
    for given, expected in ((noise, dist.sample(inputs, noise)), (None, dist.mode(inputs))):
        actions, logp = dist.act(inputs, given)
        for got, want in zip(leaves(actions), leaves(expected), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
        np.testing.assert_allclose(logp, dist.logp(inputs, expected), atol=1e-5)
        assert logp.shape == (rows,)
        assert logp.dtype == np.float32


@pytest.mark.parametrize("name", SPACES)
def test_rows_are_independent_of_how_they_are_batched(name):
    dist = make_distribution(SPACES[name])
    inputs = random_inputs(dist, rows=9)
    noise = NoiseStream(dist.noise_kinds, 5).take(9)
    together, logp = dist.act(inputs, noise)
    for i in range(9):
        one, one_logp = dist.act(inputs[i : i + 1], noise[i : i + 1])
        for got, want in zip(leaves(one), leaves(together), strict=True):
            np.testing.assert_array_equal(got[0], want[i])
        np.testing.assert_allclose(one_logp[0], logp[i], atol=1e-5)


@pytest.mark.parametrize("name", ["discrete", "discrete two", "discrete start", "multi uneven", "multi 2-D start"])
def test_categorical_frequencies_pass_a_chi_square_test(name):
    space = SPACES[name]
    dist = make_distribution(space)
    row = random_inputs(dist, scale=1.0, rows=1)
    draws = 40_000
    inputs = np.repeat(row, draws, 0)
    actions = dist.sample(inputs, NoiseStream(dist.noise_kinds, 11).take(draws))
    for part, form in torch_leaf(space, row):
        counts = np.bincount(form(torch.from_numpy(actions)).numpy(), minlength=part.probs.shape[1])
        expected = part.probs[0].numpy() * draws
        statistic = ((counts - expected) ** 2 / expected).sum()
        freedom = len(counts) - 1
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4  # beyond the 99.9 % point for 1 to 4 degrees


def test_one_row_at_a_time_draws_with_the_same_frequencies():
    dist = make_distribution(Discrete(3))
    inputs = np.log(np.array([[0.2, 0.5, 0.3]], np.float32))
    noise = NoiseStream(dist.noise_kinds, 2)
    draws = np.array([dist.act(inputs, noise.take(1))[0][0] for _ in range(20_000)])
    np.testing.assert_allclose(np.bincount(draws, minlength=3) / 20_000, [0.2, 0.5, 0.3], atol=0.012)


def test_gaussian_and_bernoulli_moments():
    gauss = make_distribution(Box(-1, 1, (2,), np.float32))
    inputs = np.repeat(np.array([[3.0, -2.0, np.log(0.5), np.log(2.0)]], np.float32), 50_000, 0)
    actions = gauss.sample(inputs, NoiseStream(gauss.noise_kinds, 4).take(50_000))
    np.testing.assert_allclose(actions.mean(0), [3.0, -2.0], atol=0.04)
    np.testing.assert_allclose(actions.std(0), [0.5, 2.0], rtol=0.02)
    bern = make_distribution(MultiBinary(2))
    inputs = np.repeat(np.array([[np.log(3.0), -np.log(9.0)]], np.float32), 50_000, 0)
    bits = bern.sample(inputs, NoiseStream(bern.noise_kinds, 4).take(50_000))
    np.testing.assert_allclose(bits.mean(0), [0.75, 0.1], atol=0.01)
    assert bits.dtype == np.int8


@pytest.mark.parametrize("name", SPACES)
def test_kl_is_what_torch_distributions_give_and_zero_to_itself(name):
    space = SPACES[name]
    dist = make_distribution(space)
    p, q = random_inputs(dist, seed=1), random_inputs(dist, seed=2)
    x, y = torch.from_numpy(p), torch.from_numpy(q)
    np.testing.assert_allclose(dist.kl_torch(x, x).numpy(), np.zeros(K), atol=1e-5)
    got = dist.kl_torch(x, y).numpy()
    assert got.min() > 0
    if name != "nested":
        pairs = zip(torch_leaf(space, p), torch_leaf(space, q), strict=True)
        want = sum(td.kl_divergence(a, b) for (a, _), (b, _) in pairs)
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [1e4, -1e4, 1e30])
def test_large_logits_give_no_nan(value):
    dist = make_distribution(Discrete(3))
    inputs = np.array([[value, 0.0, -value], [0.0, 0.0, value]], np.float32)
    best = np.array([0, 2]) if value > 0 else np.array([2, 0])
    noise = NoiseStream(dist.noise_kinds, 0).take(2)
    actions, logp = dist.act(inputs, noise)
    if value > 0:
        np.testing.assert_array_equal(actions, best)
        np.testing.assert_array_equal(logp, [0, 0])
    for rows in (slice(0, 1), slice(0, 2)):
        assert np.isfinite(dist.act(inputs[rows], noise[rows])[1]).all()
    x = torch.from_numpy(inputs).requires_grad_()
    entropy = dist.entropy_torch(x)
    (entropy.sum() + dist.logp_torch(x, torch.from_numpy(actions)).sum()).backward()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([3])])
def test_minus_infinity_is_never_drawn_and_gives_no_nan(space):
    dist = make_distribution(space)
    inputs = np.tile(np.array([[0.5, -np.inf, 0.0]], np.float32), (5000, 1))
    actions, logp = dist.act(inputs, NoiseStream(dist.noise_kinds, 1).take(5000))
    assert set(np.unique(actions)) == {0, 2}
    assert np.isfinite(logp).all()
    assert np.isfinite(dist.act(inputs[:1], None)[1]).all()
    x = torch.from_numpy(inputs[:4].copy()).requires_grad_()
    entropy, logp = dist.entropy_torch(x), dist.logp_torch(x, torch.from_numpy(actions[:4]))
    two = td.Categorical(logits=torch.tensor([0.5, 0.0]))
    np.testing.assert_allclose(entropy.detach().numpy(), np.full(4, two.entropy()), atol=1e-6)
    (entropy.sum() + logp.sum()).backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("low", [-np.inf, MASKED_LOGIT, -1e4])
@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([3, 2])])
def test_scores_of_rows_with_impossible_choices_are_finite(space, low):
    dist = make_distribution(space)
    inputs = np.zeros((2, dist.num_inputs), np.float32)
    inputs[:, 1] = low
    score = dist.score(inputs, dist.mode(inputs))
    gradient = score.gradient(np.ones(2, np.float32), -0.5)
    others = np.log(2) + (dist.num_inputs - 3) / 2 * np.log(2)
    np.testing.assert_allclose(score.entropy, np.full(2, others), atol=1e-5)
    np.testing.assert_allclose(gradient[0, :3], [0.5, 0, -0.5], atol=1e-6)


def test_extreme_bernoulli_logits_give_no_nan():
    dist = make_distribution(MultiBinary(2))
    inputs = np.array([[1e4, -1e4]], np.float32)
    actions, logp = dist.act(inputs, NoiseStream(dist.noise_kinds, 0).take(1))
    np.testing.assert_array_equal(actions, [[1, 0]])
    np.testing.assert_array_equal(logp, [0])
    score = dist.score(inputs, actions)
    for entropy in (dist.entropy_torch(torch.from_numpy(inputs)).item(), score.entropy[0]):
        assert abs(entropy) < 1e-30
    np.testing.assert_allclose(score.gradient(np.ones(1, np.float32), 1.0), [[0, 0]], atol=1e-30)
    wrong = dist.score(inputs, np.array([[0, 1]], np.int8)).gradient(np.ones(1, np.float32), 1.0)
    np.testing.assert_allclose(wrong, [[-1, 1]], atol=1e-30)


def test_an_integer_box_gets_the_nearest_integers_its_dtype_holds():
    dist = make_distribution(Box(0, 255, (3,), np.uint8))
    mode = dist.mode(np.array([[-7.0, 3.6, 900.0, 0, 0, 0]], np.float32))
    assert mode.dtype == np.uint8
    np.testing.assert_array_equal(mode, [[0, 4, 255]])
    wide = make_distribution(Box(-(2**62), 2**62, (2,), np.int64))
    np.testing.assert_array_equal(np.sign(wide.mode(np.array([[1e30, -1e30, 0, 0]], np.float32))), [[1, -1]])


def test_masked_choices_are_never_drawn_and_the_rest_is_renormalised():
    dist = make_distribution(Discrete(4, start=10))
    inputs = np.tile(np.array([[2.0, 1.0, 0.0, 5.0]], np.float32), (8000, 1))
    mask = np.tile(np.array([[1, 0, 1, 0]], np.int8), (8000, 1))
    masked = dist.apply_mask(inputs, mask)
    actions, logp = dist.act(masked, NoiseStream(dist.noise_kinds, 0).take(8000))
    assert set(np.unique(actions)) == {10, 12}
    two = td.Categorical(logits=torch.tensor([2.0, 0.0]))
    np.testing.assert_allclose((actions == 10).mean(), two.probs[0], atol=0.02)
    expected = two.log_prob(torch.from_numpy((actions == 12).astype(np.int64))).numpy()
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    np.testing.assert_array_equal(inputs[:, 1], np.ones(8000))  # the model's own output is untouched
    on_torch = dist.apply_mask_torch(torch.from_numpy(inputs), torch.from_numpy(mask))
    np.testing.assert_array_equal(on_torch.numpy(), masked)
    assert masked[0, 3] == np.float32(MASKED_LOGIT)
    assert np.exp(masked[0, 3]) == 0


def test_masks_of_products_reach_the_right_columns():
    space = Tuple((Box(-1, 1, (2,), np.float32), Discrete(2), MultiBinary(1), MultiDiscrete([2, 2])))
    dist = make_distribution(space)
    assert dist.mask_sizes == (2, 2, 2)
    mask = np.array([[0, 1, 1, 0, 0, 1], [1, 0, 0, 1, 1, 0]], bool)
    inputs = np.zeros((2, dist.num_inputs), np.float32)
    for masked in (
        dist.apply_mask(inputs, mask),
        dist.apply_mask_torch(torch.from_numpy(inputs), torch.from_numpy(mask)).numpy(),
    ):
        _, choice, _, pair = dist.mode(masked)
        np.testing.assert_array_equal(choice, [1, 0])
        np.testing.assert_array_equal(pair, [[0, 1], [1, 0]])
        np.testing.assert_array_equal((masked < -1).sum(1), [3, 3])


def test_a_row_that_allows_nothing_is_named():
    dist = make_distribution(Discrete(2))
    mask = np.array([[1, 0], [0, 1], [0, 0]])
    with pytest.raises(SpaceError, match=r"row 2 allows no choice: \[0, 0\]"):
        dist.apply_mask(np.zeros((3, 2), np.float32), mask)
    multi = make_distribution(MultiDiscrete([2, 3]))
    with pytest.raises(SpaceError, match="row 1 allows no choice in component 1"):
        multi.apply_mask(np.zeros((2, 5), np.float32), np.array([[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]))
    with pytest.raises(SpaceError, match=r"shape \(2, 4\), expected \(2, 5\)"):
        multi.apply_mask(np.zeros((2, 5), np.float32), np.ones((2, 4)))


@pytest.mark.parametrize("space", [gymnasium.spaces.Text(3), Tuple(()), Box(-1, 1, (0,), np.float32)])
def test_spaces_without_a_distribution_are_refused(space):
    with pytest.raises(SpaceError, match="space"):
        make_distribution(space)
