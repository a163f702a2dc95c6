// The live view: what /v1/stats says, once a second.

import { Chart } from "./chart.js";
import { count, duration, measure } from "./numbers.js";
import { StatsPoll } from "./stats_poll.js";
import { StatusBar } from "./status_bar.js";

const FORMS = {
  open_episodes: count,
  actions_per_s: measure,
  p50_ms: measure,
  p99_ms: measure,
  policy_version: count,
  episodes: count,
  return_mean: measure,
  sampled_steps: count,
  trained_steps: count,
  uptime_s: duration,
};
const RATES_KEPT = 120;

const numbers = document.querySelector("#numbers");
const refusals = document.querySelector("#rejected");
const returns = new Chart(document.querySelector("#returns"), {
  title: "Returns of the last episodes",
  unit: "episode",
  window: 20,
  empty: "no episode has ended yet",
});
const rates = new Chart(document.querySelector("#rates"), {
  title: "Actions a second at the last answers",
  unit: "seconds; 0 is now",
});
let history = [];
let lastAnswer = null;

function show(stats) {
  lastAnswer = new Date();
  bar.show("good", `Live: asked every second.${stats.training === false ? " The policy does not train." : ""}`);
  numbers.classList.remove("old");
  for (const [name, form] of Object.entries(FORMS)) {
    document.querySelector(`[data-stat="${name}"]`).textContent = form(stats[name]);
  }
  showRefusals(stats.rejected ?? {});
  const recent = stats.returns ?? [];
  returns.draw(recent, Math.max(1, (stats.episodes ?? recent.length) - recent.length + 1));
  history = [...history, stats.actions_per_s ?? 0].slice(-RATES_KEPT);
  rates.draw(history, 1 - history.length);
}

function showRefusals(rejected) {
  const rows = Object.entries(rejected).filter(([, times]) => times > 0);
  const total = rows.reduce((sum, [, times]) => sum + times, 0);
  document.querySelector('[data-stat="rejected"]').textContent = count(total);
  refusals.replaceChildren(
    ...rows.map(([code, times]) => {
      const item = document.createElement("li");
      item.textContent = `${code}: ${count(times)}`;
      return item;
    }),
  );
}

const bar = new StatusBar(() => poll.resume());
const poll = new StatsPoll(show, (error) => {
  numbers.classList.add("old");
  bar.showError(error, lastAnswer);
});
poll.ask();
