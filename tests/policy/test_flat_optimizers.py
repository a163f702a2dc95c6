import numpy as np
import pytest
import torch

from rlsample.errors import ConfigError
from rlsample.policy.flat_optimizers import Adam, RMSprop

KINDS = {
    "adam": (Adam, lambda p: torch.optim.Adam([p], lr=0.01, eps=1e-5)),
    "rmsprop": (RMSprop, lambda p: torch.optim.RMSprop([p], lr=0.01, alpha=0.99, eps=1e-5)),
}


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(rng.normal(scale=10.0 ** rng.integers(-4, 3), size=7).astype(np.float32)) for _ in range(steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_equal_those_of_torch(kind):
    make, make_torch = KINDS[kind]
    start = torch.linspace(-1, 1, 7)
    mine, theirs = start.clone(), torch.nn.Parameter(start.clone())
    optimizer, other = make(mine, 0.01, 1e-5), make_torch(theirs)
    for i, gradient in enumerate(gradients(60)):
        before = gradient.clone()
        if i == 30:
            optimizer.learning_rate = other.param_groups[0]["lr"] = 0.002
        optimizer.step(gradient)
        theirs.grad = gradient
        other.step()
        np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-5, atol=1e-7)
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimizer_continues_bit_for_bit(kind):
    make = KINDS[kind][0]
    steps = gradients(20)
    values = torch.zeros(7)
    optimizer = make(values, 0.01, 1e-5)
    for gradient in steps[:10]:
        optimizer.step(gradient)
    state, copy = optimizer.get_state(), values.clone()
    kept = {name: np.copy(value) for name, value in state.items()}
    for gradient in steps[10:]:
        optimizer.step(gradient)
    for name in kept:
        np.testing.assert_array_equal(state[name], kept[name])
    other = make(copy, 0.01, 1e-5)
    other.step(steps[0])
    copy.copy_(torch.zeros(7))
    fresh = make(copy, 0.01, 1e-5)
    for gradient in steps[:10]:
        fresh.step(gradient)
    fresh.set_state(kept)
    for gradient in steps[10:]:
        fresh.step(gradient)
    assert torch.equal(copy, values)


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    adam = Adam(torch.zeros(7), 0.1, 1e-5)
    adam.step(torch.ones(7))
    before = adam.get_state()
    with pytest.raises(ConfigError, match="steps"):
        adam.set_state(RMSprop(torch.zeros(7), 0.1, 1e-5).get_state())
    with pytest.raises(ConfigError, match=r"shape \(3,\), the model's is \(7,\)"):
        adam.set_state({**before, "square": np.zeros(3)})
    after = adam.get_state()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
