// A cart with its pole on a canvas. Colours are the style sheet's, so they follow light and dark.

import { ANGLE_LIMIT, POSITION_LIMIT } from "./cartpole.js";

const POLE_M = 1.0;
const CART_M = [0.4, 0.22];
const WHEEL_M = 0.06;

const shown = new WeakMap(); // canvas -> what is on it: drawing the same again would only warm the room

// pole: a CartPole. Draws it as it stands, scaled to the canvas's size on the page.
export function drawCart(canvas, pole, colours) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const wanted = [pole.state, width, height, ratio, ...Object.values(colours)];
  if (shown.get(canvas)?.every((value, i) => value === wanted[i])) return;
  shown.set(canvas, wanted);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const scale = Math.min(width / (2 * POSITION_LIMIT + 0.6), height / 1.8);
  pen.translate(width / 2, height / 2 + 0.42 * scale);
  pen.scale(scale, scale);
  drawTrack(pen, colours, scale);
  const [position, , angle] = pole.state;
  pen.translate(position, 0);
  drawBody(pen, colours);
  drawPole(pen, angle, colours, scale);
}

// Read once per frame, not per canvas.
export function coloursOf(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return { track: colour("line"), cart: colour("cart"), pole: colour("accent"), fallen: colour("bad") };
}

function drawTrack(pen, colours, scale) {
  const ground = CART_M[1] / 2 + WHEEL_M * 2;
  pen.strokeStyle = colours.track;
  pen.lineWidth = Math.max(0.02, 1 / scale);
  pen.beginPath();
  pen.moveTo(-POSITION_LIMIT - 0.25, ground);
  pen.lineTo(POSITION_LIMIT + 0.25, ground);
  for (const end of [-POSITION_LIMIT, POSITION_LIMIT]) {
    pen.moveTo(end, ground - 0.12);
    pen.lineTo(end, ground + 0.12);
  }
  pen.stroke();
}

function drawBody(pen, colours) {
  const [width, height] = CART_M;
  pen.fillStyle = colours.cart;
  pen.fillRect(-width / 2, -height / 2, width, height);
  for (const side of [-width / 4, width / 4]) {
    pen.beginPath();
    pen.arc(side, height / 2 + WHEEL_M, WHEEL_M, 0, 2 * Math.PI);
    pen.fill();
  }
}

function drawPole(pen, angle, colours, scale) {
  pen.strokeStyle = Math.abs(angle) > ANGLE_LIMIT ? colours.fallen : colours.pole;
  pen.lineWidth = Math.max(0.07, 2.5 / scale);
  pen.lineCap = "round";
  pen.beginPath();
  pen.moveTo(0, -CART_M[1] / 2);
  pen.lineTo(POLE_M * Math.sin(angle), -CART_M[1] / 2 - POLE_M * Math.cos(angle));
  pen.stroke();
}
