// The line that says how it stands with the server, and the field for the token where one is needed.

import { CallError, storedToken, storeToken } from "./server.js";

export class StatusBar {
  // onToken(token): called when one was given, and with "" when it was forgotten.
  constructor(onToken) {
    this.line = document.querySelector("#state");
    this.form = document.querySelector("#token-form");
    this.input = document.querySelector("#token");
    this.forget = document.querySelector("#forget-token");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const token = this.input.value.trim();
      if (!token) return;
      storeToken(token);
      this.input.value = "";
      this.show("wait", "Asking the server with this token …");
      onToken(token);
    });
    this.forget.addEventListener("click", () => {
      storeToken("");
      this.forget.hidden = true;
      onToken("");
    });
  }

  // kind: wait, good or bad. Says nothing anew to screen readers while the words stay.
  show(kind, words) {
    if (this.line.textContent !== words) this.line.textContent = words;
    this.line.dataset.kind = kind;
    this.form.hidden = true;
    this.forget.hidden = storedToken() === "" || kind === "bad";
  }

  // since: when the server last answered (Date), or null.
  showError(error, since = null) {
    if (!(error instanceof CallError)) throw error;
    const known = since ? ` Last answer at ${since.toLocaleTimeString()}.` : "";
    if (error.needsToken) {
      const again = storedToken() ? "The server does not take this token." : "This server wants a token.";
      this.show("bad", `${again} Give the one it was started with.`);
      this.form.hidden = false;
    } else if (error.unreachable) {
      this.show("bad", `The server cannot be reached. Trying again.${known}`);
    } else if (error.passing) {
      this.show("wait", `The server asks to wait (${error.status} ${error.code}): ${error.message}`);
    } else {
      this.show("bad", `The server refused (${error.status} ${error.code}): ${error.message}`);
    }
  }
}
