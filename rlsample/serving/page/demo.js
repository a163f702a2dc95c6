// CartPole in the browser, balanced by the policy behind the server, which learns from what happens here.

import { CartPole } from "./cartpole.js";
import { Chart, runningMean } from "./chart.js";
import { coloursOf, drawCart } from "./drawing.js";
import { count, measure } from "./numbers.js";
import { Player } from "./player.js";
import { call } from "./server.js";
import { StatsPoll } from "./stats_poll.js";
import { StatusBar } from "./status_bar.js";

const WINDOW = 20; // episodes in the mean that is shown
const WORDS_EVERY_MS = 250;

const page = Object.fromEntries(
  ["start", "stop", "carts", "big", "small", "returns", "advice", "untrained"].map((id) => [id, document.querySelector(`#${id}`)]),
);
const chart = new Chart(page.returns, {
  title: "Returns of the episodes played in this tab",
  unit: "episode",
  window: WINDOW,
  goal: 475,
  empty: "each episode will be a dot here",
});
const resting = new CartPole(() => 0.5); // shown before the first start
let player = null; // the latest one
let playing = false;
let returns = [];
let poles = [resting];
let canvases = [page.big];
let measured = { steps: 0, at: 0, rate: null }; // steps a second, over the last second
let drawn = -1; // episodes in the chart as drawn
let trained = null;
let wordsAt = 0;

async function start() {
  if (page.start.disabled) return;
  bar.show("wait", "Asking the server what it plays …");
  page.start.disabled = true;
  page.advice.hidden = true;
  try {
    const spaces = await call("v1/spaces");
    if (!playsCartPole(spaces)) {
      bar.show("bad", "The policy behind this server plays something else than CartPole.");
      page.advice.hidden = false;
      return;
    }
    await play(new Player(Number(page.carts.value), watcher));
  } catch (error) {
    bar.showError(error);
  } finally {
    playing = false;
    buttons();
    showNumbers();
  }
}

async function play(fresh) {
  player = fresh;
  playing = true;
  player.realTime = chosenSpeed() === "real";
  returns = [];
  drawn = -1;
  measured = { steps: 0, at: performance.now(), rate: null };
  poles = player.carts.map((cart) => cart.pole);
  layOut(player.carts.length);
  buttons();
  bar.show("good", "Playing.");
  poll.resume();
  await player.run();
  bar.show("wait", "Stopped. Open episodes were ended as cut off.");
}

const watcher = {
  onEpisode: ({ total }) => returns.push(total),
  onTrouble: (error) => (error ? bar.showError(error) : bar.show("good", "Playing.")),
  onLost: (error) => bar.show("bad", `The server lost these episodes (${error.message}). Starting new ones.`),
};

// Space descriptions of the protocol: four numbers in, one of two actions out.
function playsCartPole({ observation_space: obs, action_space: action }) {
  return obs.type === "Box" && String(obs.shape) === "4" && action.type === "Discrete" && action.n === 2 && !action.start;
}

function buttons() {
  page.start.disabled = playing;
  page.stop.disabled = !playing;
  page.carts.disabled = playing;
}

function chosenSpeed() {
  return document.querySelector('input[name="speed"]:checked').value;
}

// The first cart is drawn large, the others small.
function layOut(numCarts) {
  const small = Array.from({ length: numCarts - 1 }, () => document.createElement("canvas"));
  page.small.replaceChildren(...small);
  canvases = [page.big, ...small];
}

function frame(now) {
  const colours = coloursOf(document.body);
  canvases.forEach((canvas, i) => drawCart(canvas, poles[i] ?? resting, colours));
  if (now - wordsAt >= WORDS_EVERY_MS) {
    wordsAt = now;
    showNumbers();
  }
  requestAnimationFrame(frame);
}

function showNumbers() {
  const { steps, episodes, policyVersion } = player ?? { steps: 0, episodes: 0, policyVersion: null };
  const now = performance.now();
  if (now - measured.at >= 1000) {
    const rate = playing ? (1000 * (steps - measured.steps)) / (now - measured.at) : null;
    measured = { steps, at: now, rate };
  }
  const means = runningMean(returns, WINDOW);
  const texts = {
    steps: count(steps),
    episodes: count(episodes),
    steps_per_s: count(measured.rate),
    mean: measure(means.at(-1)),
    best: measure(means.length ? means.reduce((best, mean) => Math.max(best, mean)) : null),
    version: count(policyVersion),
    trained: count(trained),
  };
  for (const [name, words] of Object.entries(texts)) document.querySelector(`[data-stat="${name}"]`).textContent = words;
  if (drawn !== returns.length) chart.draw(returns);
  drawn = returns.length;
}

const bar = new StatusBar((token) => {
  if (token) start();
});
const poll = new StatsPoll(
  (stats) => {
    trained = stats.trained_steps;
    page.untrained.hidden = stats.training !== false;
  },
  () => {}, // the player reports what is wrong; this number just stands still
);

page.start.addEventListener("click", start);
page.stop.addEventListener("click", () => {
  page.stop.disabled = true;
  player?.stop();
});
for (const choice of document.querySelectorAll('input[name="speed"]')) {
  choice.addEventListener("change", () => {
    if (player) player.realTime = chosenSpeed() === "real";
  });
}
page.carts.addEventListener("change", () => {
  poles = [];
  layOut(Number(page.carts.value));
});
addEventListener("pagehide", () => player?.leave());

layOut(Number(page.carts.value));
requestAnimationFrame(frame);
