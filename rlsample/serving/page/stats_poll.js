// Asks for /v1/stats once a second while the tab is looked at.

import { call } from "./server.js";

const EVERY_MS = 1000;

export class StatsPoll {
  // onStats(stats), onError(CallError). After a 401 it rests until resume().
  constructor(onStats, onError) {
    Object.assign(this, { onStats, onError, timer: null, asking: false, needsToken: false });
    document.addEventListener("visibilitychange", () => this.ask());
  }

  resume() {
    this.needsToken = false;
    this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    if (this.asking || this.needsToken || document.visibilityState === "hidden") return;
    this.asking = true;
    try {
      this.onStats(await call("v1/stats", { timeoutS: 5 }));
    } catch (error) {
      this.needsToken = error.needsToken === true;
      this.onError(error);
    } finally {
      this.asking = false;
    }
    if (!this.needsToken) this.timer = setTimeout(() => this.ask(), EVERY_MS);
  }
}
