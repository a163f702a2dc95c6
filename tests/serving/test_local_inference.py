"""A client that acts by itself: its rows are those of the server's acting, uploaded once; newer weights in time."""

import functools

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlsample.errors import EpisodeLostError, ServingError, SpaceError
from rlsample.policy import DQNPolicy, DQNSettings, PPOPolicy, PPOSettings
from rlsample.policy.model_settings import ModelSettings
from rlsample.tree import concat
from tests.env.serving.conftest import RuledPolicy, at
from tests.serving.client_rig import LosingProxy, Rig, client_of, quick
from tests.serving.test_client import AsyncFace

OBS = Box(-np.inf, np.inf, (2,), np.float32)
MODELS = {
    "PPO": (PPOPolicy, PPOSettings, Discrete(3)),
    "PPO of a Box": (PPOPolicy, PPOSettings, Box(-0.01, 0.01, (2,), np.float32)),  # narrow: most actions are clipped
    "DQN": (DQNPolicy, DQNSettings, Discrete(3)),
}


def rig_of(kind="PPO", **options):
    policy, settings, action_space = MODELS[kind]
    model = ModelSettings(hidden=(8, 8), activation="relu", shared=True)
    return Rig(functools.partial(policy, settings=settings(model=model)), (OBS, action_space), **options)


def local(rig, **options):
    return client_of(rig, **{"inference": "local", "seed": 0, **options})


def play(client, episodes=3, steps=7):
    """Plays; what was done: (obs, action, reward) of each step."""
    done = []
    for episode in range(episodes):
        client.start_episode()
        for step in range(steps):
            obs = at(episode + 1, step)
            done.append((tuple(obs.tolist()), client.get_action(obs), float(10 * episode + step)))
            client.log_returns(done[-1][2] - 0.25)
            client.log_returns(0.25)
        client.end_episode(at(episode + 1, steps), truncated=episode == 1)
    return done


def columns(rig, count):
    """All rows, which are exactly ``count``, as columns in the order of episode and step."""
    batches = rig.finish(count)
    order = np.lexsort((concat([b["t"] for b in batches]), concat([b["obs"][:, 0] for b in batches])))
    names = {"next_obs", *batches[0]} - {"eps_id", "fragment_id", "env_id", "policy_version"}
    return {name: concat([b[name] for b in batches])[order] for name in sorted(names)}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("fragment_rows", [3, 100])
def test_rows_of_local_inference_are_those_of_remote_inference(kind, fragment_rows):
    with rig_of(kind, explore=False) as rig, client_of(rig) as client:
        done = play(client)
        remote = columns(rig, 21)
    with rig_of(kind, explore=False) as rig, local(rig, fragment_rows=fragment_rows) as client:
        assert str(play(client)) == str(done)
        here = columns(rig, 21)
    assert set(here) == set(remote)
    if isinstance(MODELS[kind][2], Box):  # the server keeps the policy's own action, the client the one that was taken
        remote["actions"] = remote["actions"].clip(-0.01, 0.01)
        assert (np.abs(remote["actions"]) == np.float32(0.01)).any()
        del here["action_logp"], remote["action_logp"]
    for name, column in remote.items():
        assert here[name].dtype == column.dtype
        if column.dtype.kind == "f":
            np.testing.assert_allclose(here[name], column, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(here[name], column, err_msg=name)


def test_the_logp_of_a_clipped_action_is_that_of_the_action_taken():
    with rig_of("PPO of a Box") as rig, local(rig) as client:
        play(client)
        policy = rig.evaluator.policy
        got = columns(rig, 21)
    assert (np.abs(got["actions"]) <= np.float32(0.01)).all()
    assert (np.abs(got["actions"]) == np.float32(0.01)).any()
    np.testing.assert_allclose(got["action_logp"], policy.logp(got["obs"], got["actions"]), rtol=1e-4, atol=1e-5)


def test_rows_of_the_async_client_are_uploaded_too():
    with rig_of() as rig, AsyncFace(rig.server.url, inference="local", seed=0) as client:
        done = play(client)
        got = columns(rig, 21)
    assert got["actions"].tolist() == [action for _, action, _ in done]
    assert got["rewards"].tolist() == [reward for _, _, reward in done]


@pytest.mark.parametrize("fragment_rows", [2, 100])
def test_an_upload_whose_answer_is_lost_is_counted_once(fragment_rows):
    with rig_of() as rig, LosingProxy(rig.server.address) as proxy:
        with local(proxy, fragment_rows=fragment_rows) as client:
            proxy.lose["fragments"] = proxy.lose["episodes"] = proxy.lose["weights"] = 2
            done = play(client)
        got = columns(rig, 21)
        uploads = [status for name, status in proxy.seen if name == "fragments"]
        assert uploads == [200] * (2 + (3 if fragment_rows == 100 else 12))
    assert got["actions"].tolist() == [action for _, action, _ in done]
    assert got["terminated"].tolist() == ([False] * 6 + [True]) + [False] * 7 + ([False] * 6 + [True])
    assert got["truncated"].tolist() == [False] * 7 + ([False] * 6 + [True]) + [False] * 7


def test_an_upload_that_gave_up_may_be_made_again():
    with rig_of() as rig, LosingProxy(rig.server.address) as proxy:
        with local(proxy, fragment_rows=1, timeout_s=0.3) as client:
            client.start_episode(timeout_s=20.0)
            client.get_action(at(1, 0))
            client.log_returns(1.0)
            proxy.lose["fragments"] = 1000
            with pytest.raises(ServingError, match="counted once"):
                client.get_action(at(1, 1))
            proxy.lose.clear()
            client.get_action(at(1, 1), timeout_s=20.0)
            client.log_returns(2.0)
            client.end_episode(at(1, 2))
        got = columns(rig, 2)
    assert got["rewards"].tolist() == [1.0, 2.0]
    assert got["next_obs"].tolist() == [[1.0, 1.0], [1.0, 2.0]]


def test_weights_are_looked_up_again_and_sent_when_they_are_new():
    with rig_of(explore=False) as rig, LosingProxy(rig.server.address) as proxy:
        policy = rig.evaluator.policy
        with local(proxy, update_interval_s=0.0) as client:
            client.start_episode()
            for step in range(3):
                client.get_action(at(1, step))
            assert [status for name, status in proxy.seen if name == "weights"] == [200, 304, 304, 304]
            bias = next(name for name in policy.get_weights() if "policy_head" in name and name.endswith("bias"))
            for action in (2, 0, 1):
                policy.set_weights({**policy.get_weights(), bias: np.eye(3, dtype=np.float32)[action] * 100})
                assert client.get_action(at(1, 9)) == action
            assert [status for name, status in proxy.seen if name == "weights"] == [200, 304, 304, 304, 200, 200, 200]
        with local(proxy, update_interval_s=3600.0) as client:
            client.start_episode()
            policy.set_weights({**policy.get_weights(), bias: np.eye(3, dtype=np.float32)[2] * 100})
            assert client.get_action(at(1, 9)) == 1


def test_when_no_newer_weights_can_be_had_the_old_ones_go_on(caplog, monkeypatch):
    monkeypatch.setattr("rlsample.serving.local_calls._UPDATE_S", 0.1)
    with rig_of() as rig, LosingProxy(rig.server.address) as proxy, local(proxy, update_interval_s=0.0) as client:
        client.start_episode()
        proxy.lose["weights"] = 1000
        assert client.get_action(at(1, 0)) in (0, 1, 2)
        assert "acting on with weights of version" in caplog.text


def test_several_episodes_and_actions_chosen_elsewhere():
    with rig_of() as rig, local(rig) as client:
        a, b, c = (
            client.start_episode("a"),
            client.start_episode("b"),
            client.start_episode("c", training_enabled=False),
        )
        actions = client.get_actions(np.stack([at(1, 0), at(2, 0), at(3, 0)]), [a, b, c])
        client.log_returns(1.0, episode_id=a)
        client.log_returns(2.0, {"infos": "stay here"}, b)
        client.log_action(at(1, 1), 2, a, action_logp=-0.5)
        client.log_action(at(2, 1), 1, b)
        client.log_action(at(2, 2), 0, b)
        client.log_returns(3.0, episode_id=b)
        actions += client.get_actions([[2, 3], [1, 2]], [b, a])
        for number, episode in enumerate((a, b, c), 1):
            client.end_episode(at(number, 9), episode)
        got = columns(rig, 7)
        assert rig.server.stats()["open_episodes"] == 0
    assert got["obs"].tolist() == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [2, 3]]
    assert got["actions"].tolist() == [actions[0], 2, actions[4], actions[1], 1, 0, actions[3]]
    assert got["rewards"].tolist() == [1.0, 0.0, 0.0, 2.0, 0.0, 3.0, 0.0]
    assert got["action_logp"][1] == -0.5
    assert np.isnan(got["action_logp"]).tolist() == [False] * 4 + [True, True, False]


def test_an_episode_without_any_action_leaves_nothing():
    with rig_of() as rig, local(rig) as client:
        client.start_episode()
        client.log_returns(3.0)
        client.end_episode(at(1, 0))
        assert client.open_episodes == []
        play(client, episodes=1, steps=1)
        assert columns(rig, 1)["rewards"].tolist() == [0.0]
        assert rig.server.stats()["open_episodes"] == 0


def test_wrong_values_raise_before_anything_is_kept():
    with rig_of() as rig, local(rig) as client:
        client.start_episode()
        for bad in (np.zeros(3, np.float32), [1, float("nan")], None):
            with pytest.raises(SpaceError):
                client.get_action(bad)
        with pytest.raises(SpaceError, match="outside the space"):
            client.log_action(at(1, 0), 3)
        with pytest.raises(SpaceError, match="leave it out"):
            client.log_action(at(1, 0), 2, action_logp=float("nan"))
        client.log_action(at(1, 0), 2, action_logp=-1.0)
        with pytest.raises(ServingError, match="the reward is nan"):
            client.log_returns(float("nan"))
        with pytest.raises(SpaceError):
            client.end_episode(np.zeros(3, np.float32))
        client.end_episode(at(1, 1))
        assert columns(rig, 1)["actions"].tolist() == [2]


def test_an_episode_that_expired_on_the_server_is_lost():
    with rig_of() as rig, local(rig) as client:
        episode = client.start_episode()
        client.get_action(at(1, 0))
        with client_of(rig) as other, pytest.raises(ServingError):
            other.start_episode(episode)  # it is open there as well
        rig.env.end_episode(at(1, 1), episode)
        with pytest.raises(EpisodeLostError, match="start a new episode"):
            client.end_episode(at(1, 1))
        assert client.open_episodes == []


def test_policies_that_only_the_server_can_run_say_so():
    class OwnWay(PPOPolicy):
        def act(self, obs, explore=True):
            return super().act(obs, explore)

    for policy, options, words in (
        (RuledPolicy, {}, "RuledPolicy acts in its own way"),
        (OwnWay, {}, "OwnWay acts in its own way"),
        (PPOPolicy, {"observation_filter": "MeanStdFilter"}, "observation_filter"),
    ):
        with Rig(policy, (OBS, Discrete(3)), **options) as rig, local(rig) as client:
            for _ in range(2):
                with pytest.raises(ServingError, match=words):
                    client.start_episode()


def test_the_seed_makes_the_draws():
    with rig_of() as rig:
        with local(rig) as client:
            first = play(client)
        with local(rig) as client:
            assert play(client) == first
        with local(rig, seed=1) as client:
            assert play(client) != first
    assert quick().seed is None
