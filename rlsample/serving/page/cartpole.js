// CartPole-v1, step for step as Gymnasium's: the same numbers, rewards and ends.

export const MAX_STEPS = 500;
export const POSITION_LIMIT = 2.4; // m from the middle
export const ANGLE_LIMIT = (12 * 2 * Math.PI) / 360; // rad from upright
export const STEP_S = 0.02;

const GRAVITY = 9.8;
const POLE_MASS = 0.1;
const TOTAL_MASS = POLE_MASS + 1.0;
const HALF_POLE = 0.5; // m
const POLE_MOMENT = POLE_MASS * HALF_POLE;
const FORCE = 10.0; // N, to the right for action 1

export class CartPole {
  // random: a function that returns numbers in [0, 1).
  constructor(random = Math.random) {
    this.random = random;
    this.reset();
  }

  reset() {
    // [position, velocity, angle, angular velocity]
    this.state = Array.from({ length: 4 }, () => -0.05 + 0.1 * this.random());
    this.steps = 0;
    this.ended = false;
  }

  // The four numbers as float32, which is what Gymnasium hands out. The state itself stays float64.
  observation() {
    return this.state.map(Math.fround);
  }

  // One step of 20 ms. At step 500 of an episode in which the pole falls, both flags are true.
  step(action) {
    if (action !== 0 && action !== 1) throw new RangeError(`an action is 0 or 1, got ${action}`);
    if (this.ended) throw new Error("the episode has ended: call reset()");
    const [position, velocity, angle, spin] = this.state;
    const force = action === 1 ? FORCE : -FORCE;
    const cos = Math.cos(angle);
    const sin = Math.sin(angle);
    const push = (force + POLE_MOMENT * (spin * spin) * sin) / TOTAL_MASS;
    const spinRate = (GRAVITY * sin - cos * push) / (HALF_POLE * (4 / 3 - (POLE_MASS * (cos * cos)) / TOTAL_MASS));
    const acceleration = push - (POLE_MOMENT * spinRate * cos) / TOTAL_MASS;
    this.state = [
      position + STEP_S * velocity,
      velocity + STEP_S * acceleration,
      angle + STEP_S * spin,
      spin + STEP_S * spinRate,
    ];
    this.steps += 1;
    const terminated = Math.abs(this.state[0]) > POSITION_LIMIT || Math.abs(this.state[2]) > ANGLE_LIMIT;
    const truncated = this.steps >= MAX_STEPS;
    this.ended = terminated || truncated;
    return { reward: 1, terminated, truncated };
  }
}
