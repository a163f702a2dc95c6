import numpy as np
import pytest
import torch

from rlsample.policy.losses import clipped_surrogate, explained_variance, policy_gradient, value_loss


def rows(n=300, seed=0):
    rng = np.random.default_rng(seed)
    logp, old = rng.normal(-1, 0.3, size=(2, n)).astype(np.float32)
    return logp, old, rng.normal(size=n).astype(np.float32)


def test_clipped_surrogate_equals_autograd():
    logp, old, advantages = rows()
    x = torch.from_numpy(logp).requires_grad_()
    ratio = (x - torch.from_numpy(old)).exp()
    a = torch.from_numpy(advantages)
    loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    loss.backward()
    got = clipped_surrogate(logp, old, advantages, 0.2)
    assert got.loss == pytest.approx(loss.item(), abs=1e-6)
    np.testing.assert_allclose(got.d_logp, x.grad.numpy(), atol=1e-8)
    assert got.d_logp.dtype == np.float32
    ratio = ratio.detach().numpy()
    assert 0.2 < got.clip_fraction < 0.8
    assert got.clip_fraction == pytest.approx(((ratio > 1.2) | (ratio < 0.8)).mean())
    assert got.approx_kl == pytest.approx((ratio - 1 - np.log(ratio)).mean(), abs=1e-6)


def test_clipped_surrogate_by_hand():
    # ratios 2, 2, 0.5, 0.5, 1 with advantages of both signs: only what moves further out is cut off.
    old = np.zeros(5, np.float32)
    logp = np.log(np.array([2, 2, 0.5, 0.5, 1], np.float32))
    advantages = np.array([1, -1, 1, -1, 3], np.float32)
    got = clipped_surrogate(logp, old, advantages, 0.25)
    # min terms: 1.25, -2, 0.5, -0.75, 3
    assert got.loss == pytest.approx(-2.0 / 5)
    np.testing.assert_allclose(got.d_logp, np.array([0, 2, -0.5, 0, -3]) / 5, rtol=1e-6)
    assert got.clip_fraction == pytest.approx(0.8)


def test_policy_gradient_equals_autograd():
    logp, _, advantages = rows()
    x = torch.from_numpy(logp).requires_grad_()
    loss = -(x * torch.from_numpy(advantages)).mean()
    loss.backward()
    got, d_logp = policy_gradient(logp, advantages)
    assert got == pytest.approx(loss.item(), abs=1e-6)
    np.testing.assert_allclose(d_logp, x.grad.numpy(), atol=1e-8)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_equals_autograd(clip):
    values, targets, old = rows()
    x, y, o = (torch.from_numpy(a) for a in (values, targets, old))
    x.requires_grad_()
    predicted = x if clip is None else o + (x - o).clamp(-clip, clip)
    loss = torch.nn.functional.mse_loss(predicted, y)
    loss.backward()
    got, gradient = value_loss(values, targets, old, clip)
    assert got == pytest.approx(loss.item(), abs=1e-6)
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-8)
    assert (gradient == 0).any() == (clip is not None)


def test_explained_variance_by_hand():
    targets = np.array([1, 2, 3, 6], np.float32)  # variance 3.5
    assert explained_variance(targets + 5, targets) == pytest.approx(1.0)
    assert explained_variance(np.zeros(4, np.float32), targets) == pytest.approx(0.0)
    # residuals 0, 0, 0, 4: variance 3
    assert explained_variance(np.array([1, 2, 3, 2], np.float32), targets) == pytest.approx(1 - 3 / 3.5)
    assert explained_variance(np.array([0, 9], np.float32), np.array([4, 4], np.float32)) == 0.0
