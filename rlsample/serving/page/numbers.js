// Numbers for people: 12,345 and 0.83; a dash where there is none.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const FINE = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

export function count(value) {
  return isNumber(value) ? WHOLE.format(value) : "–";
}

// digits after the point where it is small enough to matter.
export function measure(value) {
  if (!isNumber(value)) return "–";
  return Math.abs(value) < 100 ? FINE.format(value) : WHOLE.format(value);
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.floor(seconds);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}
