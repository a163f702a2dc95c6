// Plays several CartPoles at once against the server. One round: an action for every open episode, by one call. Beside
// the rounds, each cart whose episode has ended closes it and opens the next.

import { CartPole, STEP_S } from "./cartpole.js";
import { call, callWhileLeaving, CallError, insist, pause } from "./server.js";

const AFTER_LOSS_MS = 1000;

class Cart {
  constructor() {
    this.pole = new CartPole();
    this.renewal = null; // the promise of a new episode, while it is on its way
    this.forget();
  }

  get playing() {
    return this.episodeId !== null && this.ending === null && this.renewal === null;
  }

  // As before its first episode: nothing open, nothing owed.
  forget() {
    this.pole.reset();
    Object.assign(this, { episodeId: null, actions: 0, owed: 0, total: 0, ending: null });
  }
}

export class Player {
  // watcher: onEpisode({ total, length, terminated, truncated }), onTrouble(CallError or null),
  // onLost(CallError): the server no longer knows the open episodes, new ones are started.
  constructor(numCarts, watcher) {
    this.carts = Array.from({ length: numCarts }, () => new Cart());
    this.watcher = watcher;
    this.realTime = true;
    this.steps = 0;
    this.episodes = 0;
    this.policyVersion = null;
    this.stopping = new AbortController();
    this.failure = null; // what ends the run
    this.lost = false; // episodes, since the last answer
    this.left = false;
  }

  // Plays until stop(), then ends what is open. Throws a CallError that waiting cannot mend, such as 401.
  async run() {
    const { signal } = this.stopping;
    try {
      let next = performance.now();
      while (!signal.aborted) {
        await this.round();
        next = Math.max(next + STEP_S * 1000, performance.now() - 100); // after a stall: no hurry to catch up
        const early = next - performance.now();
        if (this.realTime && early > 0) await pause(early, signal);
        if (!this.realTime) next = performance.now();
      }
    } catch (error) {
      if (!signal.aborted) throw error;
    } finally {
      this.stopping.abort();
      await Promise.allSettled(this.carts.map((cart) => cart.renewal));
      await Promise.allSettled(this.carts.map((cart) => this.breakOff(cart)));
    }
  }

  stop() {
    this.stopping.abort();
  }

  // The page goes away: no time to wait for answers. An action that is under way is not carried out: the count says so.
  leave() {
    this.left = true;
    this.stopping.abort();
    for (const cart of this.carts) {
      if (cart.episodeId === null) continue;
      callWhileLeaving(episodePath(cart, "end"), endBody(cart));
      cart.forget();
    }
  }

  async round() {
    for (const cart of this.carts) {
      if (!cart.playing && !cart.renewal) cart.renewal = this.renew(cart).finally(() => (cart.renewal = null));
    }
    const playing = this.carts.filter((cart) => cart.playing);
    if (playing.length > 0) await this.act(playing);
    else await Promise.race(this.carts.map((cart) => cart.renewal));
    if (this.failure) throw this.failure;
  }

  async act(carts) {
    const body = {
      episode_ids: carts.map((cart) => cart.episodeId),
      obs: carts.map((cart) => cart.pole.observation()),
      rewards: carts.map((cart) => cart.owed),
    };
    try {
      const { actions, policy_version: version } = await this.insist("v1/actions", body);
      if (this.left) return;
      this.policyVersion = version;
      carts.forEach((cart, i) => this.step(cart, actions[i]));
      if (this.lost) this.watcher.onTrouble(null);
      this.lost = false;
    } catch (error) {
      await this.mend(error, carts);
    }
  }

  step(cart, action) {
    const { reward, terminated, truncated } = cart.pole.step(action);
    this.steps += 1;
    cart.actions += 1;
    cart.owed = reward;
    cart.total += reward;
    if (!terminated && !truncated) return;
    cart.ending = { terminated, truncated };
    this.episodes += 1;
    this.watcher.onEpisode({ total: cart.total, length: cart.actions, terminated, truncated });
  }

  // Closes an ended episode and opens the next.
  async renew(cart) {
    try {
      if (cart.ending) await this.insist(episodePath(cart, "end"), endBody(cart));
      cart.forget();
      cart.episodeId = (await this.insist("v1/episodes", {})).episode_id;
    } catch (error) {
      await this.mend(error, [cart]);
    }
  }

  // Where the server does not know episodes any more, their carts start anew; else the error ends the run.
  async mend(error, carts) {
    if (!isLoss(error)) {
      this.failure ??= error;
      return;
    }
    this.lost = true;
    this.watcher.onLost(error);
    await Promise.allSettled(carts.map((cart) => this.breakOff(cart)));
    await pause(AFTER_LOSS_MS, this.stopping.signal);
  }

  // Ends an open episode early: cut off, not failed. One try; what the server does not take, it lets expire.
  async breakOff(cart) {
    if (cart.episodeId === null) return;
    const path = episodePath(cart, "end");
    const body = endBody(cart);
    cart.forget();
    await call(path, { body, timeoutS: 3 });
  }

  insist(path, body) {
    // Longer than the server makes an action wait.
    return insist(path, { body, timeoutS: 90, stop: this.stopping.signal, onTrouble: this.watcher.onTrouble });
  }
}

function episodePath(cart, verb) {
  return `v1/episodes/${encodeURIComponent(cart.episodeId)}/${verb}`;
}

// An episode that is still going on is cut off. One that fell at its last step has terminated: nothing follows.
function endBody(cart) {
  const body = { obs: cart.pole.observation(), truncated: !cart.ending?.terminated, t: cart.actions };
  if (cart.actions > 0) body.reward = cart.owed;
  return body;
}

// The server was restarted, the episode expired, or the policy failed.
function isLoss(error) {
  return error instanceof CallError && [404, 409, 500].includes(error.status);
}
