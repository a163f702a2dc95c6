// Calls to the server this page came from: JSON, the token, and what went wrong in words.

const TOKEN_KEY = "rlsample-token";
const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 5;

export class CallError extends Error {
  // status: HTTP status, 0 where no answer came. code: of the protocol. waitS: what Retry-After asked for, or null.
  constructor(status, code, message, waitS = null) {
    super(message);
    Object.assign(this, { status, code, waitS });
  }

  get unreachable() {
    return this.status === 0;
  }

  get needsToken() {
    return this.status === 401;
  }

  // Worth asking again with the same words.
  get passing() {
    return this.status === 0 || this.status === 429 || this.status === 503;
  }
}

// The token lives in this tab only and goes with it.
export function storedToken() {
  try {
    return sessionStorage.getItem(TOKEN_KEY) ?? "";
  } catch {
    return "";
  }
}

export function storeToken(token) {
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
}

// 128 random bits. randomUUID would need https or localhost.
export function freshKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function request(body, key) {
  const headers = { Accept: "application/json" };
  const token = storedToken();
  if (token) headers.Authorization = `Bearer ${token}`;
  if (key) headers["Idempotency-Key"] = key;
  if (body === undefined) return { method: "GET", headers, cache: "no-store" };
  headers["Content-Type"] = "application/json";
  return { method: "POST", headers, body: JSON.stringify(body) };
}

// One request, one answer. Throws CallError.
export async function call(path, { body, key, timeoutS = 10 } = {}) {
  let response;
  let answer;
  try {
    response = await fetch(path, { ...request(body, key), signal: AbortSignal.timeout(timeoutS * 1000) });
    answer = await response.json();
  } catch (error) {
    if (!response || response.ok) throw new CallError(0, "unreachable", `no answer from the server (${error.message})`);
    answer = {};
  }
  if (response.ok) return answer;
  const { code = "unknown", message = response.statusText } = answer.error ?? {};
  const waitS = Number.parseFloat(response.headers.get("Retry-After"));
  throw new CallError(response.status, code, message, Number.isFinite(waitS) ? waitS : null);
}

// As call, but asks again while the trouble may pass, with one key, so that nothing is counted twice.
// stop: an AbortSignal that ends the waits. onTrouble: called with each CallError, and with null once it works again.
export async function insist(path, { body, timeoutS, stop, onTrouble }) {
  const key = freshKey();
  for (let tries = 0; ; tries += 1) {
    try {
      const answer = await call(path, { body, key, timeoutS });
      if (tries > 0) onTrouble(null);
      return answer;
    } catch (error) {
      if (!(error instanceof CallError) || !error.passing || stop.aborted) throw error;
      onTrouble(error);
      const waitS = error.waitS ?? Math.min(FIRST_WAIT_S * 2 ** tries, LONGEST_WAIT_S);
      if (!(await pause(waitS * 1000, stop))) throw error;
    }
  }
}

// A last call while the page goes away: sent even if nobody is left to hear the answer.
export function callWhileLeaving(path, body) {
  fetch(path, { ...request(body, freshKey()), keepalive: true }).catch(() => {});
}

// Waits; false if stop came first.
export function pause(ms, stop) {
  if (stop.aborted) return Promise.resolve(false);
  return new Promise((resolve) => {
    const done = (whole) => {
      clearTimeout(timer);
      stop.removeEventListener("abort", onStop);
      resolve(whole);
    };
    const onStop = () => done(false);
    const timer = setTimeout(() => done(true), ms);
    stop.addEventListener("abort", onStop);
  });
}
